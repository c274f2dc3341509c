"""Which module was called under which name, and for which time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests import zoo

X = torch.randn(2, 4)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def called(model: Callable[..., Any], *args: Any) -> list[str]:
    """The call sites of a model in order, the root left out."""
    calls = whence.capture(model, args or (X,)).calls
    return [str(call.site) for call in calls if call.site.path]


def test_shared_module_has_a_call_site_for_each_call() -> None:
    """A module called four times has four call sites, numbered."""
    sites = called(zoo.SharedLayer(), torch.randn(2, zoo.WIDTH))
    assert [site for site in sites if site.startswith("block@") or site == "block"] == [
        "block",
        "block@1",
        "block@2",
        "block@3",
    ]


def test_children_of_a_shared_module_are_numbered_with_it() -> None:
    """What a shared module calls is numbered too, each under the call it was made from."""
    program = whence.capture(zoo.SharedLayer(), (torch.randn(2, zoo.WIDTH),))
    third = program.calls.at("block", 2)
    assert [str(call.site) for call in program.calls.children(third)] == [
        "block.norm@2",
        "block.up@2",
        "block.down@2",
        "block.dropout@2",
    ]


def test_operations_name_the_call_they_ran_in() -> None:
    """The same operation in four calls of one module has four origins."""
    program = whence.capture(zoo.SharedLayer(), (torch.randn(2, zoo.WIDTH),))
    found = [program.where(node).calls[0].index for node in program.select("block.up :: aten.linear")]
    assert found == [0, 1, 2, 3]


class TwoNames(nn.Module):
    """One module under two names."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = linear()
        self.second = self.first
        self.many = nn.ModuleList([self.first, linear()])
        self.named = nn.ModuleDict({"one": self.first})
        self.chain = nn.Sequential(self.first, nn.ReLU())
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def by_attribute(m: TwoNames, x: Tensor) -> Tensor:
    hidden = m.second(x)
    return m.first(hidden)


def by_index(m: TwoNames, x: Tensor) -> Tensor:
    return m.many[0](x)


def by_negative_index(m: TwoNames, x: Tensor) -> Tensor:
    return m.many[-2](x)


def by_iteration(m: TwoNames, x: Tensor) -> Tensor:
    for layer in m.many:
        x = layer(x)
    return x


def by_enumeration(m: TwoNames, x: Tensor) -> Tensor:
    for _, layer in enumerate(m.many):
        x = layer(x)
    return x


def by_key(m: TwoNames, x: Tensor) -> Tensor:
    return m.named["one"](x)


def by_values(m: TwoNames, x: Tensor) -> Tensor:
    for layer in m.named.values():
        x = layer(x)
    return x


def by_items(m: TwoNames, x: Tensor) -> Tensor:
    for _, layer in m.named.items():
        x = layer(x)
    return x


def by_sequential(m: TwoNames, x: Tensor) -> Tensor:
    return m.chain(x)


def by_getattr(m: TwoNames, x: Tensor) -> Tensor:
    return getattr(m, "second")(x)  # noqa: B009


def by_get_submodule(m: TwoNames, x: Tensor) -> Tensor:
    return m.get_submodule("second")(x)


def nested_in_one_expression(m: TwoNames, x: Tensor) -> Tensor:
    return m.second(m.first(x))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (by_attribute, ["second", "first"]),
        (by_index, ["many.0"]),
        (by_negative_index, ["many.0"]),
        (by_iteration, ["many.0", "many.1"]),
        (by_enumeration, ["many.0", "many.1"]),
        (by_key, ["named.one"]),
        (by_values, ["named.one"]),
        (by_items, ["named.one"]),
        (by_sequential, ["chain", "chain.0", "chain.1"]),
        (by_getattr, ["second"]),
        (by_get_submodule, ["second"]),
        (nested_in_one_expression, ["first", "second"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_module_with_two_names_has_the_one_it_was_reached_by(
    body: Callable[[Any, Tensor], Tensor], expected: list[str]
) -> None:
    """A module under several names is known by the name the model's own code used for that call."""
    assert called(TwoNames(body)) == expected


def test_calls_under_two_names_are_counted_apart() -> None:
    """The first call under a second name is call 0 of that name."""
    sites = called(zoo.SharedAcrossNames(), torch.randn(2, 3, zoo.WIDTH), torch.randn(2, 5, zoo.WIDTH))
    assert sites[0] == "question"
    assert "answer" in sites
    assert not [site for site in sites if "@" in site]


def test_module_called_outside_its_parent() -> None:
    """A closure that calls a sibling makes a call under the sibling's own path, from the closure's caller."""
    model = nn.Sequential(linear())
    model.append(zoo.Neighbour(model[0]))
    program = whence.capture(model, (X,))
    again = program.calls.at("0", 1)
    assert str(program.calls.rows[again.parent].site) == "1"


def test_bound_method_is_captured_below_its_module() -> None:
    """Capturing a method names modules from the method's owner."""
    model = zoo.Mlp()
    assert called(model.forward, torch.randn(2, zoo.WIDTH)) == ["norm", "up", "down", "dropout"]


def test_modules_of_a_function_have_the_names_of_its_variables() -> None:
    """Capturing a function names modules by the variables it holds them in."""
    encoder, decoder = linear(), nn.Sequential(linear())
    assert called(lambda x: decoder(encoder(x))) == ["encoder", "decoder", "decoder.0"]


def test_modules_among_the_arguments_of_a_partial() -> None:
    """Capturing a partial names the modules it holds."""

    def apply(layer: nn.Module, x: Tensor, *, then: nn.Module) -> Tensor:
        return then(layer(x))

    assert called(partial(apply, linear(), then=linear())) == ["args_0", "then"]


def test_method_other_than_forward() -> None:
    """A module's other methods are captured too, and what they call has its path."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def encode(self, x: Tensor) -> Tensor:
            return self.inner(x)

    assert called(Coder().encode) == ["inner"]


def test_forward_called_directly_is_no_call() -> None:
    """`layer.forward(x)` passes by the module's call, so what it does belongs to the caller."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x)

    assert called(Direct()) == []


def test_recursive_module_is_called_from_itself() -> None:
    """A module that calls itself has a call site inside a call site."""

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return self.layer(x) if depth == 0 else self(x, depth - 1) + 1

    program = whence.capture(Halving(), (X,))
    roots = [call for call in program.calls if not call.site.path]
    assert [(call.site.index, call.parent) for call in roots] == [(0, 0), (1, 1), (2, 2)]
