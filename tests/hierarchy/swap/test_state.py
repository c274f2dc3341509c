"""What becomes of state that others use, too, when another module takes its holder's place."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.hierarchy.plan.test_facts_parts import chain, with_the_last_given_to_the_first
from tests.hierarchy.swap.test_preserved import Counting, X, check_swap, newcomer, same, trained
from tests.program.small import sine_loss

WIDTH = 4


class Twice(nn.Module):
    """One module under two names, called under both."""

    def __init__(self, names: str = "ab") -> None:
        super().__init__()
        self.names = names
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = getattr(self, name)(x).sin()
        return x


@pytest.mark.parametrize("path", ["a", "b"])
@pytest.mark.parametrize("backward", [False, True])
def test_shared_module(path: str, backward: bool) -> None:
    """Row 132: calls under one of its names go to the new module, those under the other stay."""
    check_swap(Twice, path, backward)
    check_swap(lambda: Twice("aab"), path, backward)


@pytest.mark.parametrize("backward", [False, True])
def test_name_that_is_not_called(backward: bool) -> None:
    """What keeps the original under a name that nobody calls has no gradient, as in eager mode."""
    model = Twice("aa")
    example = X.clone().requires_grad_(backward)
    tree = whence.capture(model, (example,), backward=backward, preserve_calls="a").unflatten(copy=True)
    new = newcomer(model, "a")
    for one in (model, tree):
        one.set_submodule("a", deepcopy(new))
        trained(one, X)
        assert one.get_parameter("b.weight").grad is None
        assert one.get_parameter("a.weight").grad is not None


class Counted(nn.Module):
    """One counting module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Counting()
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(self.b(self.a(x)).sin())
        return result


class Resetting(nn.Module):
    """Writes a buffer of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Counting()

    def forward(self, x: Tensor) -> Tensor:
        self.a.count.zero_()
        result: Tensor = self.a(x)
        return result


class Reading(nn.Module):
    """Reads a weight of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).sin() @ self.a.weight


class Tied(nn.Module):
    """Reads a weight that two of its children hold."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sin() @ self.b.weight


class Giving(nn.Module):
    """Returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class Doubling(Giving):
    """Returns twice its parameter."""

    def forward(self) -> Tensor:
        return self.weight * 2


class Given(nn.Module):
    """Uses a parameter that its child returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Giving()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a()


class ReadingOften(nn.Module):
    """Reads a weight of its child between two calls of that, and its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).cos() @ self.a.weight
        hidden = self.a(hidden).tanh() * self.a.weight.sum()
        return self.a((hidden + self.a.bias).sin()) @ self.a.weight.exp()


class Deep(nn.Module):
    """The same, further inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ReadingOften()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.sin())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("make", "path"), [(Reading, "a"), (ReadingOften, "a"), (Deep, "inner.a"), (Deep, "inner")]
)
def test_weight_read_by_the_parent(make: Callable[[], nn.Module], path: str, backward: Any) -> None:
    """The parent reads the new module's weight, whose gradient is added up in eager's order."""
    check_swap(make, path, backward)


def test_weight_returned_to_the_parent() -> None:
    """The parent uses the new module's weight, which it is given."""
    check_swap(Given, "a", False)


def test_weight_that_was_frozen() -> None:
    """What the parent computes with it has no captured gradient, and would have one in eager mode."""
    model = Reading()
    model.a.weight.requires_grad_(False)
    tree = whence.capture(model, (X,), backward=True, preserve_calls="a").unflatten(copy=True)
    new = nn.Linear(WIDTH, WIDTH)
    tree.set_submodule("a", new)
    with pytest.raises(whence.CallError, match="reads it, too, and it was frozen at capture"):
        tree(X)
    new.weight.requires_grad_(False)
    tree(X).sum().backward()
    model.a = deepcopy(new)
    model.zero_grad()
    model(X).sum().backward()
    assert same([new.bias.grad], [model.a.bias.grad])


class Padded(nn.Linear):
    """A weight of another shape under the name."""

    def __init__(self) -> None:
        super().__init__(WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight[:, :WIDTH], self.bias)


@pytest.mark.parametrize(
    ("make", "backward", "told"),
    [
        (Counted, False, "b.count is of a module that was replaced, and it is written, and was a.count, too"),
        (Counted, True, "b.count is of a module that was replaced, and it is written, and was a.count, too"),
        (Resetting, False, "a.count is of a module that was replaced, and the model's forward writes it"),
        (Tied, False, "the model's forward reads a.weight or b.weight, which were one"),
        (Tied, True, "the model's forward reads a.weight or b.weight, which were one"),
    ],
)
def test_state_that_cannot_be_told_apart(make: Callable[[], nn.Module], backward: bool, told: str) -> None:
    """State of the original that the graph around uses, too, is not confused with the new module's."""
    model, example = make(), X.clone().requires_grad_(backward)
    tree = whence.capture(model, (example,), backward=backward, preserve_calls="?").unflatten(copy=True)
    path = "b" if hasattr(model, "b") else "a"
    tree.set_submodule(path, newcomer(model, path))
    with pytest.raises(whence.CallError) as raised:
        tree(example)
    assert told in str(raised.value)


def test_weight_of_another_shape() -> None:
    """It cannot follow the one that the parent reads, too."""
    tree = whence.capture(Reading(), (X,), backward=True, preserve_calls="a").unflatten(copy=True)
    tree.set_submodule("a", Padded())
    with pytest.raises(whence.CallError, match="reads it, too, so that its gradient is a sum"):
        tree(X)


def test_both_names_replaced() -> None:
    """One new module under both names is as one module was before."""
    model = Counted()
    tree = whence.capture(model, (X,), preserve_calls="?").unflatten(copy=True)
    new = newcomer(model, "a")
    for one in (model, tree):
        own = deepcopy(new)
        one.set_submodule("a", own)
        one.set_submodule("b", own)
    assert torch.equal(tree(X), model(X))
    assert tree.get_buffer("a.count") == model.get_buffer("a.count") == 3
    tree.set_submodule("b", deepcopy(new))
    with pytest.raises(whence.CallError, match=r"it is written, and was b\.count, too"):
        tree(X)


def test_result_that_was_a_parameter() -> None:
    """What returned its parameter is not replaced by what returns something else."""
    tree = whence.capture(Given(), (X,), preserve_calls="a").unflatten()
    tree.set_submodule("a", Doubling())
    with pytest.raises(whence.CallError, match=r"its result is new, and was a\.weight at capture"):
        tree(X)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # PyTorch asks for it
def test_under_a_compiler() -> None:
    """A new module under `torch.compile` changes its buffers once, and what is refused stays refused."""
    model: Any = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    tree = whence.capture(model, (X,), preserve_calls="0").unflatten(copy=True)
    compiled = torch.compile(tree, backend="eager")
    compiled(X)
    new = newcomer(model, "0")
    tree.set_submodule("0", deepcopy(new))
    model.set_submodule("0", deepcopy(new))
    found: Any = tree.get_parameter("0.weight")
    for one in (model, compiled):
        one(X).sin().sum().backward()
    assert torch.equal(found.grad, model[0].weight.grad)
    assert torch.equal(tree.get_buffer("0.running_mean"), model[0].running_mean)
    resetting = whence.capture(Resetting(), (X,), preserve_calls="a").unflatten()
    resetting.set_submodule("a", Counting())
    with pytest.raises(whence.CallError, match="writes it"):
        torch.compile(resetting, backend="eager")(X)


@pytest.mark.parametrize("backward", [False, True])
def test_flat_module_of_a_program_with_preserved_calls(backward: bool) -> None:
    """The flat module makes no calls: it takes no module for a new one, trains, and writes its buffers."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    example = X.clone().requires_grad_(backward)
    program = whence.capture(model, (example,), backward=backward, preserve_calls="*")
    assert program.verify(model, (example,)).ok
    flat, other = program.module(copy=True), deepcopy(model)
    assert same(trained(flat, X), trained(other, X))
    assert torch.equal(flat.get_buffer("1.running_mean"), other.get_buffer("1.running_mean"))


@pytest.mark.filterwarnings("ignore:their callers' graphs hold these modules")
def test_module_that_stays_in_its_callers_graph() -> None:
    """A preserved module whose operations cannot be one call is no new one either: it trains."""
    model = chain()
    program = with_the_last_given_to_the_first(model, whence.Phase.FORWARD, joint=True)
    number = program.calls.at("0").number
    calls = replace(program.calls, preserved=frozenset({number}))
    tree = program.with_changes(calls=calls).unflatten(copy=True)
    tree(X)[0].backward()
    sine_loss(model(X)).backward()
    assert same(*[[held.grad for held in one.parameters()] for one in (tree, model)])
