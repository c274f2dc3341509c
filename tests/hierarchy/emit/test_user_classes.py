"""`program.unflatten(onto=model)`: the user's own classes with the captured `forward`."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import backward_of, differing, gradients, leaves_no_trace, state
from tests.models import case
from tests.program.small import Stack, sine_loss

MODELS = ("llama", "gpt2", "bert", "albert", "tied_language_model")


class Leaf(nn.Module):
    """A class with a slot, a property, a class method, and an `__init__` that takes what is not kept."""

    __slots__ = ("note",)
    made = 0
    calls: Tensor

    def __init__(self, width: int, *, note: str) -> None:
        super().__init__()
        type(self).made += 1
        self.note = note
        self.weight = nn.Parameter(torch.randn(width, width))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.activation = self.squash

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    def squash(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.activation(x @ self.weight)


class Model(nn.Module):
    leaves: Any
    named: Any

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(Leaf(4, note=f"leaf {at}") for at in range(3))
        self.named = nn.ModuleDict({"last": nn.Linear(4, 4)})
        self.alias = self.leaves[0]
        self.absent = None
        self.plain = [self.leaves[1], {"head": self.named["last"]}]
        self.config = {"name": "model"}

    def forward(self, x: Tensor) -> Tensor:
        for leaf in self.leaves:
            x = leaf(x)
        return self.named["last"](self.alias(x))

    def total(self) -> int:
        return sum(leaf.width for leaf in self.leaves)

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


X = torch.randn(2, 4)


def captured(**options: Any) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model()
    program = whence.capture(model, (X,), **options)
    with leaves_no_trace(model):
        tree = program.unflatten(onto=model)
    return model, tree


def test_modules_are_of_the_user_s_classes() -> None:
    """Each is of exactly the class, made without `__init__`; names, aliases and containers are kept."""
    before = Leaf.made
    model, tree = captured()
    assert Leaf.made == before + 3
    ours, theirs = (dict(m.named_modules(remove_duplicate=False)) for m in (tree, model))
    assert {path: type(module) for path, module in ours.items()} == {p: type(m) for p, m in theirs.items()}
    assert not {*map(id, ours.values())} & {*map(id, theirs.values())}
    assert tree.alias is tree.leaves[0] and tree.absent is None
    assert len(tree.leaves) == 3 and [leaf.note for leaf in tree.leaves] == ["leaf 0", "leaf 1", "leaf 2"]
    assert list(tree.named) == ["last"]
    assert tree.plain[0] is tree.leaves[1] and tree.plain[1]["head"] is tree.named["last"]
    assert tree.leaves[2].activation.__self__ is tree.leaves[2]
    assert list(tree.state_dict()) == list(model.state_dict())
    assert repr(tree) == repr(model)


def test_tensors_are_shared_and_methods_work() -> None:
    """Parameters are the model's own; what the class defines works, over the captured `forward`."""
    model, tree = captured()
    assert all(p is q for p, q in zip(tree.parameters(), model.parameters(), strict=True))
    assert tree.total() == 12 and tree.config is model.config
    assert torch.equal(tree.twice(X), copy.deepcopy(model).twice(X))
    assert torch.equal(tree.leaves[1](X), torch.tanh(X @ model.leaves[1].weight))
    with pytest.raises(whence.CallError):
        tree(torch.randn(3, 5))


def bits(module: nn.Module, args: Any, kwargs: Any, *, has_loss: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    leaves = tree_leaves(module(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    if has_loss:
        leaves[0].backward()
    found = {f"output {at}": leaf.detach() for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return found | gradients(module) | state(module)


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", ["forward", "loss"])
@pytest.mark.parametrize("name", MODELS)
def test_runs_as_the_ordinary_tree(name: str, mode: str) -> None:
    """Outputs, gradients and buffers are the ordinary tree's, bit for bit."""
    row = case(name)
    model, args, kwargs = row.make()
    program = whence.capture(model, args, kwargs, backward=backward_of(row, mode))
    tree = program.unflatten(onto=model, copy=True)
    assert type(tree) is type(model)
    expected = bits(program.unflatten(copy=True), args, kwargs, has_loss=mode == "loss")
    assert differing(expected, bits(tree, args, kwargs, has_loss=mode == "loss")) == []


def test_trains_saves_and_copies() -> None:
    """A step changes what the model's step would change; a copy is a tree of its own; its state loads."""
    model, tree = captured(backward=sine_loss)
    twin = copy.deepcopy(tree)
    expected = Model()
    expected.load_state_dict(model.state_dict())
    for module in (twin, expected):
        loss = module(X)[0] if module is twin else sine_loss(module(X))
        loss.backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert differing(state(expected), state(twin)) == []
    assert twin.leaves[0].activation.__self__ is twin.leaves[0]
    assert not torch.equal(twin.leaves[0].weight, model.leaves[0].weight)
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    file.seek(0)
    tree.load_state_dict(torch.load(file))
    assert torch.equal(tree.leaves[0].weight, twin.leaves[0].weight)


def test_another_instance_of_the_class() -> None:
    """The program's own tensors on the attributes of another instance."""
    model, _ = captured()
    other = Model()
    other.config = {"name": "other"}
    tree = whence.capture(model, (X,)).unflatten(onto=other)
    assert tree.config is other.config
    assert tree.leaves[0].weight is model.leaves[0].weight


def test_exported_program_onto_the_class() -> None:
    """What was read from torch.export goes onto the class, too."""
    model = Stack()
    x = torch.randn(3, 4)
    tree = whence.from_exported_program(torch.export.export(model, (x,))).unflatten(onto=model)
    assert type(tree.layers[0]) is type(model.layers[0])
    assert torch.equal(tree(x), model(x))


def test_captures_again_and_swaps() -> None:
    """A tree of the user's classes is captured again, and its preserved modules are replaced."""
    _, tree = captured(preserve_calls=["named.last"])
    again = whence.capture(tree, (X,))
    assert {str(call.site) for call in again.calls} >= {"leaves.1", "named.last"}
    assert torch.equal(again.unflatten(onto=tree)(X), tree(X))
    before = tree(X)
    tree.named["last"] = nn.Linear(4, 4)
    assert not torch.equal(tree(X), before)


def test_module_that_was_not_called() -> None:
    """A module without a graph says so, and its eager `forward` does not run by mistake."""
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner["used"](x)

    holder = Holder()
    tree = whence.capture(holder, (X,)).unflatten(onto=holder)
    assert torch.equal(tree(X), holder(X))
    with pytest.raises(whence.CallError, match="Linear has no graph of its own"):
        tree.inner["unused"](X)


class Demanding(nn.Module):
    """Cannot be made without arguments."""

    def __new__(cls, width: int) -> Demanding:
        made = super().__new__(cls)
        made.__dict__["width"] = width
        return made

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_new_that_demands_arguments() -> None:
    """It is named with what to do, and so is every module that does not fit."""
    model = nn.Sequential(Demanding(4), nn.ReLU())
    program = whence.capture(model, (X,))
    with pytest.raises(whence.UsageError, match="Demanding cannot be made without arguments") as caught:
        program.unflatten(onto=model)
    assert "unflatten without onto" in str(caught.value)
    with pytest.raises(whence.UsageError, match="0 was a Demanding, and is a Linear") as caught:
        program.unflatten(onto=nn.Sequential(nn.Linear(4, 4)))
    assert "the model has no module '1'" in str(caught.value)


def test_what_is_no_module() -> None:
    """A program of a function has no class; a class is no module."""
    model = nn.Linear(4, 4)
    with pytest.raises(whence.UsageError, match="is no module, so it has no class"):
        whence.capture(partial(model), (X,)).unflatten(onto=model)
    with pytest.raises(whence.UsageError, match="onto must be a module, got int"):
        whence.capture(model, (X,)).unflatten(onto=3)  # type: ignore[call-overload]
