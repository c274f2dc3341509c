"""Modules whose calling convention an export kept: another may take their place."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from tests.checks import same_bits

X = torch.randn(3, 4)


class Sized(nn.Module):
    """Computes with a size of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(x.shape[0], 2, 2).reshape(x.shape[0], 4) + torch.ones(x.shape[0], 1)


class Casting(nn.Module):
    """Casts its argument to the dtype that it has: the tracer knows the argument by another name then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(torch.float32))


class Counting(nn.Module):
    """Writes a buffer in every call."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.linear(self.norm(x)) + self.count


class Residual(nn.Module):
    """Reads after the first call what it was given."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = kind(), kind()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(self.first(x)) + self.first(x) + x, x


class Around(nn.Module):
    """Calls a module that does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual(Casting)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.inner(x * 2)
        return y * x


SHAPES = {"fixed": None, "auto": {"x": {0: Dim.AUTO}}, "bounded": {"x": {0: Dim("rows", min=2, max=8)}}}


def replaced(
    model: nn.Module, name: str, preserved: tuple[str, ...], shapes: Any, *, decomposed: bool
) -> None:
    """Put another module in a place of the tree and of the model, and compare what they compute."""
    exported = torch.export.export(
        model, (X,), dynamic_shapes=shapes, preserve_module_call_signature=preserved
    )
    tree = whence.unflatten(exported.run_decompositions() if decomposed else exported)
    assert isinstance(tree.get_submodule(name)(X), Tensor)
    new = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    tree.set_submodule(name, new)
    model.set_submodule(name, deepcopy(new))
    x = X if shapes is None else torch.randn(5, 4)
    found, expected = (torch.utils._pytree.tree_leaves(one(x)) for one in (tree, model))
    assert all(map(same_bits, found, expected))
    state = model.state_dict()
    assert all(same_bits(held, state[key]) for key, held in tree.state_dict().items())


@pytest.mark.sample(4)
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kind", [Sized, Casting, Counting])
def test_replaced(kind: type[nn.Module], shapes: str, decomposed: bool) -> None:
    """Open sizes, casts to the same dtype and buffers that several calls write do not hinder it."""
    replaced(Residual(kind), "first", ("first",), SHAPES[shapes], decomposed=decomposed)


@pytest.mark.parametrize("preserved", [("inner.first",), ("inner.first", "inner.second"), ("inner",)])
def test_casts_inside_of_several_calls(preserved: tuple[str, ...]) -> None:
    """What was cast inside of calls around each other is told apart at every border."""
    model = Around()
    if preserved == ("inner",):
        exported = torch.export.export(model, (X,), preserve_module_call_signature=preserved)
        found, expected = whence.unflatten(exported).get_submodule("inner")(X), model.inner(X)
        assert same_bits(found[0], expected[0]) and found[1] is X
    else:
        replaced(model, preserved[-1], preserved, None, decomposed=False)


class Same(nn.Module):
    """Returns its argument, which the tracer knows by another name then."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32)


class Known(nn.Module):
    """Reads both."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.linear, self.same, self.again = nn.Linear(4, 4), Same(), again

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        result = self.same(hidden) * 2
        return result + hidden if self.again else result


def test_a_result_that_is_the_argument() -> None:
    """Of two readers nobody can tell which value they meant, so nothing new may come between."""
    replaced(Known(again=False), "same", ("same",), None, decomposed=False)
    exported = torch.export.export(Known(again=True), (X,), preserve_module_call_signature=("same",))
    tree = whence.unflatten(exported)
    assert tree.get_submodule("same")(X) is X
    tree.set_submodule("same", nn.Tanh())
    with pytest.raises(whence.CallError, match="same"):
        tree(X)
    tree.set_submodule("same", nn.Identity())
    assert same_bits(tree(X), exported.module()(X))


def test_sizes_follow_from_arguments() -> None:
    """A module of an export with open sizes is called alone with tensors, not with their sizes."""
    model = Residual(Sized)
    tree = whence.unflatten(torch.export.export(model, (X,), dynamic_shapes=SHAPES["auto"]))
    for rows in (2, 3, 7):
        x = torch.randn(rows, 4)
        assert same_bits(tree.get_submodule("second")(x), model.second(x))
