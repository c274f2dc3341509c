"""Exported programs with open sizes: rows 119, 128 and 159 to 168 as far as they concern a tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from tests.interop.helpers import EVERY_WAY, exported, program_of, unflattened

X = torch.arange(24.0).reshape(6, 4)


class SharedSize(nn.Module):
    """A size is computed once and used by two children and their parent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Repeats()
        self.second = Repeats()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = self.second(self.first(x, rows), rows)
        return x.reshape(rows * 4) + rows


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        return self.linear(x) + torch.arange(rows).unsqueeze(1)


def opened(way: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = SharedSize()
    shapes = {"x": {0: Dim("rows", min=2, max=10)}}
    return model, unflattened(exported(model, (X,), way=way, dynamic_shapes=shapes))


@pytest.mark.sample(4)
@EVERY_WAY
@pytest.mark.parametrize("rows", [2, 6, 9])
def test_row_128_defect_17_size_used_in_two_children(way: str, rows: int) -> None:
    """A size used in two submodules reaches both, for every size that the export allows."""
    model, tree = opened(way)
    x = torch.randn(rows, 4)
    assert torch.equal(tree(x), model(x))


@EVERY_WAY
def test_row_163_range_violations(way: str) -> None:
    """A size outside of its range is refused with the range."""
    _, tree = opened(way)
    with pytest.raises(whence.CallError, match=r"dim 0 of `args\[0\]` is 11, and must be at most 10"):
        tree(torch.randn(11, 4))
    with pytest.raises(whence.CallError, match=r"args\[0\] was f32\[s\w+, 4\] at capture, is f32\[3, 5\]"):
        tree(torch.randn(3, 5))
    with pytest.raises(whence.CallError, match=r"is f32\[3, 4, 1\]"):
        tree(torch.randn(3, 4, 1))


class Related(nn.Module):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.cat([x, x]) + y + z.sum()


@EVERY_WAY
def test_row_162_derived_sizes(way: str) -> None:
    """Sizes that must be equal, or a multiple of one another, are checked."""
    rows = Dim("rows", max=64)
    shapes = {"x": {0: rows}, "y": {0: 2 * rows}, "z": {0: rows}}
    program = exported(
        Related(), (torch.ones(3, 2), torch.ones(6, 2), torch.ones(3)), way=way, dynamic_shapes=shapes
    )
    tree = unflattened(program)
    good = (torch.ones(5, 2), torch.ones(10, 2), torch.ones(5))
    assert torch.equal(tree(*good), Related()(*good))
    with pytest.raises(whence.CallError, match=r"dim 0 of `args\[1\]` is 9, and must be"):
        tree(good[0], torch.ones(9, 2), good[2])
    with pytest.raises(
        whence.CallError, match=r"dim 0 of `args\[2\]` is 4, and must be what dim 0 of `args\[0\]` is"
    ):
        tree(*good[:2], torch.ones(4))


def test_a_size_is_found_from_what_is_derived() -> None:
    """Where only a multiple of a size is given, the size is computed from it, and must be whole."""
    rows = Dim("rows", min=2, max=9)
    tree = unflattened(exported(nn.Tanh(), (torch.ones(6, 2),), dynamic_shapes={"input": {0: 2 * rows}}))
    assert torch.equal(tree(torch.ones(8, 2)), torch.ones(8, 2).tanh())
    for count, words in ((7, "must be of the form 2"), (20, "must be at most 18")):
        with pytest.raises(whence.CallError, match=words):
            tree(torch.ones(count, 2))


class Number(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x[:n] * n


def test_row_168_open_numbers() -> None:
    """An open integer argument is one, for every value."""
    program = exported(Number(), (X, 3), dynamic_shapes={"x": None, "n": Dim.DYNAMIC})
    tree = unflattened(program)
    for n in (2, 5):
        assert torch.equal(tree(X, n), Number()(X, n))
    with pytest.raises(whence.CallError, match=r"args\[1\] was a whole number at capture"):
        tree(X, "3")


class Unbacked(nn.Module):
    """Sizes that depend on data, in two children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Chosen()
        self.second = Chosen()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum() + self.second(x * 2).sum()


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        n = x[0, 1].to(torch.int64).item()
        torch._check(n >= 0)
        torch._check(n <= 6)
        return self.linear(x[:n])


@pytest.mark.parametrize("way", ["non-strict", "strict", "loaded"])
def test_rows_43_119_assertions_and_sizes_from_data(way: str) -> None:
    """Assertions stay in the module that made them, and hold at run time."""
    torch.manual_seed(0)
    model = Unbacked()
    program = program_of(model, (X,), way=way)
    tree = program.unflatten()
    for value in (1.0, 3.0):
        x = X.clone()
        x[0, 1] = value
        assert torch.equal(tree(x), model(x))
    x[0, 1] = 7
    with pytest.raises(RuntimeError):
        tree(x)


@EVERY_WAY
def test_gradients_with_open_sizes(way: str) -> None:
    """A tree with open sizes trains as eager."""
    model, tree = opened(way)
    x = torch.randn(4, 4)
    for module in (model, tree):
        module(x).square().sum().backward()
    for (name, ours), theirs in zip(tree.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_transposed_input_with_open_sizes() -> None:
    """An input in another memory layout is laid out as at capture."""
    model, tree = opened("non-strict")
    x = torch.randn(4, 5).t()
    assert torch.equal(tree(x), model(x))


@pytest.mark.parametrize("dims", [{"x": {0: Dim.AUTO}}, {"x": {0: Dim.DYNAMIC}}, ({0: Dim.AUTO},)])
def test_row_160_spellings_of_open_sizes(dims: Any) -> None:
    """However the sizes were opened, the tree takes them."""
    torch.manual_seed(0)
    model = SharedSize()
    tree = unflattened(exported(model, (X,), dynamic_shapes=dims))
    assert torch.equal(tree(X[:3]), model(X[:3]))
