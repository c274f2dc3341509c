"""When a capture is stale: rows 57 to 63, 68, 72 and 73. What recompiles in PyTorch is a violation here."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.upstream.checks import equal
from tests.upstream.modules import Block

X = torch.randn(3, 4)


class Net(nn.Module):
    """Two blocks under names, a flag and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.twice = False
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        for _, child in self.named_children():
            x = child(x)
        return x * self.scale if self.twice else x


def _stale(program: whence.Program, model: Any, *args: Any) -> list[str]:
    """What a check reports, by name."""
    return [violation.guard.what for violation in program.check(model, args or None)]


def _fresh(model: nn.Module, x: Tensor = X) -> whence.Program:
    """A capture that verifies and whose guards hold."""
    program = whence.capture(model, (x,))
    assert program.verify(model, (x,)).ok
    assert _stale(program, model, x) == []
    return program


def test_row_57_changed_attribute_is_stale() -> None:
    """An attribute that was read makes the capture stale; the next capture has the new value."""
    model = Net()
    program = _fresh(model)
    model.twice = True
    assert _stale(program, model) == ["twice"]
    again = _fresh(model)
    assert not equal(again.module()(X), program.module()(X))
    model.scale = 3.0
    assert _stale(program, model) == ["twice"]
    assert _stale(again, model) == ["scale"]


@pytest.mark.parametrize("table", ["_modules", "_parameters", "_buffers"])
def test_row_58_another_order_is_stale(table: str) -> None:
    """Code that iterates over children, parameters or buffers depends on their order."""

    class Iterating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.ReLU()
            self.one, self.two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
            self.register_buffer("three", torch.ones(4))
            self.register_buffer("four", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            for child in self.children():
                x = child(x)
            for number, tensor in enumerate([*self.parameters(recurse=False), *self.buffers(recurse=False)]):
                x = x + number * tensor
            return x

    model = Iterating()
    program = _fresh(model)
    entries = vars(model)[table]
    name = next(iter(entries))
    entries[name] = entries.pop(name)
    (what,) = _stale(program, model)
    assert what.endswith("of the model")


def test_row_59_flipped_requires_grad_is_stale() -> None:
    """A parameter of a submodule that no longer takes a gradient, or takes one again."""
    model = Net()
    program = _fresh(model)
    weight = model.second.up.weight
    weight.requires_grad_(False)
    assert _stale(program, model) == ["second.up.weight"]
    weight.requires_grad_(True)
    assert _stale(program, model) == []


def test_row_60_another_dtype_is_stale_once() -> None:
    """After a move the capture is stale; a new one is not."""
    model = Net()
    program = _fresh(model)
    model.double()
    assert "first.up.weight" in _stale(program, model)
    again = _fresh(model, X.double())
    assert _stale(again, model, X.double()) == []
    assert _stale(again, copy.deepcopy(model), X.double()) == []


def test_row_61_another_forward_is_stale() -> None:
    """A forward put on an instance before the capture is recorded; one put there later is seen."""
    model = Net()

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    vars(model.first)["forward"] = doubled
    program = _fresh(model)
    del model.first.forward
    assert _stale(program, model) == ["first.forward"]

    program = _fresh(model)
    vars(model.second)["forward"] = doubled
    assert _stale(program, model) == ["second.forward"]


def test_row_61_forward_replaced_while_running_is_seen_and_undone() -> None:
    """A model that replaces a forward while it runs is captured with it; afterwards it is as it was."""

    class Patching(Net):
        def forward(self, x: Tensor) -> Tensor:
            vars(self.first)["forward"] = torch.tanh
            return self.first(x)

    model = Patching()
    program = whence.capture(model, (X,))
    assert equal(program.module()(X), torch.tanh(X))
    assert "forward" not in vars(model.first)


def _partial_class() -> nn.Module:
    class Base(nn.Module):
        def scaled(self, x: Tensor, *, by: float = 1.0) -> Tensor:
            return x * by

        forward = functools.partialmethod(scaled, by=3.0)

    return Base()


def _partial_instance(*factors: float) -> nn.Module:
    def scaled(x: Tensor, *, by: float = 1.0, plus: float = 0.0) -> Tensor:
        return x * by + plus

    model = nn.Identity()
    forward: Callable[..., Tensor] = functools.partial(scaled, by=factors[0])
    for more in factors[1:]:
        forward = functools.partial(forward, plus=more)
    model.forward = forward  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "build",
    [_partial_class, lambda: _partial_instance(2.0), lambda: _partial_instance(2.0, 1.0)],
    ids=["class", "instance", "stacked"],
)
def test_row_62_partial_as_forward(build: Callable[[], nn.Module]) -> None:
    """`functools.partial` as forward, of a class or an instance, also stacked."""
    model = build()
    program = _fresh(model)
    assert equal(program.module()(X), model(X))
    assert equal(program.unflatten()(X), model(X))


def test_row_62_partial_with_another_argument_is_stale() -> None:
    """What a partial fixes is part of the capture."""
    program = whence.capture(_partial_instance(2.0), (X,))
    assert _stale(program, _partial_instance(2.0)) == []
    assert _stale(program, _partial_instance(3.0)) == ["forward"]
    assert _stale(program, _partial_instance(2.0, 1.0)) == ["forward"]


def test_row_63_one_partial_on_many_layers_holds() -> None:
    """Layers whose forward is wrapped in the same way are no reason to capture again."""

    def around(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return forward(x) + 1

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        for layer in model:
            layer.forward = functools.partial(around, layer.forward)
        return model

    model = build()
    program = _fresh(model)
    assert _stale(program, copy.deepcopy(model), X) == []
    assert _stale(program, build(), X) == []


def test_row_68_one_capture_stands_for_all_instances() -> None:
    """Instances of one class share a capture: it runs on the state of each."""
    program = _fresh(Net())
    for _ in range(3):
        other = Net()
        assert _stale(program, other, X) == []
        assert equal(program.guarded(other)(X), other(X))


def test_row_72_hook_on_a_child() -> None:
    """A hook is in the graph; without it, or with another one, the capture is stale."""
    model = Net()

    def twice(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    def thrice(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 3

    handle = model.first.register_forward_hook(twice)
    program = _fresh(model)
    assert program.select("first :: aten.mul.Tensor")
    handle.remove()
    assert _stale(program, model) == ["hooks of first"]
    model.first.register_forward_hook(thrice)
    (violation,) = program.check(model)
    assert "twice" in str(violation)
    assert "thrice" in str(violation)
    assert equal(_fresh(model).module()(X), model(X))


def test_row_73_hook_on_the_root() -> None:
    """The captured module's own hooks count too."""
    model = Net()
    handle = model.register_forward_hook(lambda module, args, output: output + 1)
    program = _fresh(model)
    assert equal(program.module()(X), model(X))
    handle.remove()
    assert _stale(program, model) == ["hooks of the model"]
