"""What an exported program writes, the tree writes: rows 96 to 105, and defects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.interop.helpers import BOTH_FRONTS, EVERY_WAY, exported, is_eager, program_of, tree_of, unflattened

X = torch.arange(8.0).reshape(2, 4)


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


class Nested(nn.Module):
    """A parent and its grandchild write the grandchild's buffer, in any order."""

    own: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.child: Any = nn.Sequential(Counter())
        self.register_buffer("own", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.child[0].count.mul_(2)
        x = self.child(x)
        self.own.add_(self.child[0].count)
        self.child[0].count.sub_(0.5)
        return self.child(x) * self.own


class Repeated(nn.Module):
    """One counter, called three times, and read in between."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        x = self.counter(x)
        between = self.counter.count * 3
        return self.counter(self.counter(x)) + between


@pytest.mark.sample(5)
@EVERY_WAY
@pytest.mark.parametrize("model", [Counter(), Nested(), Repeated()], ids=lambda model: type(model).__name__)
def test_rows_96_97_99_buffers(model: nn.Module, way: str) -> None:
    """A buffer written by a child, a parent and a grandchild, in one call or several, is eager's."""
    tree_of(model, (X,), way=way)


@BOTH_FRONTS
def test_rows_96_136_call_of_a_counter_alone(way: str) -> None:
    """A submodule that writes a buffer does so when it is called alone."""
    tree = tree_of(Repeated(), (X,), way=way)
    eager = Repeated()
    assert torch.equal(tree.counter(X), eager.counter(X))
    assert torch.equal(tree.counter.count, eager.counter.count)
    is_eager(tree, eager, (X,))


class WritesInput(nn.Module):
    """A child writes an argument, and the parent reads it then."""

    def __init__(self) -> None:
        super().__init__()
        self.child = AddsInPlace()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = x * y
        self.child(x)
        return before + x


class AddsInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


@EVERY_WAY
def test_rows_100_101_inputs(way: str) -> None:
    """An input written by a child is written by the tree, and the parent reads what it became."""
    tree_of(WritesInput(), (X.clone(), X.clone()), way=way)


@EVERY_WAY
def test_row_102_several_levels_in_the_flat_module(way: str) -> None:
    """The flat module writes buffers of several levels."""
    program = program_of(copy.deepcopy(Nested()), (X,), way=way)
    is_eager(program.module(copy=True), Nested(), (X,))
    assert {row.path for row in program.signature.outputs_of(whence.OutputKind.MUTATION)} == {
        "child.0.count",
        "own",
    }


class WritesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.5)
        return self.inner(x)


@EVERY_WAY
def test_row_103_defect_8_parameter_written_without_grad(way: str) -> None:
    """A parameter written under no_grad is written by the tree, after decomposition too."""
    torch.manual_seed(0)
    model = WritesParameter()
    tree_of(model, (X,), way=way)


def test_row_103_parameter_keeps_its_gradient() -> None:
    """What overwrites a parameter under no_grad leaves its gradient as in eager."""
    torch.manual_seed(0)
    model = WritesParameter()
    tree = tree_of(model, (X,))
    model(X).sum().backward()
    tree(X).sum().backward()
    assert torch.equal(model.inner.weight.grad, tree.inner.weight.grad)  # type: ignore[arg-type]


class WritesConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.foo = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.foo.add_(1)
        return x + self.foo


def test_row_104_constant_is_written() -> None:
    """A tensor attribute that is written stays written, and cannot go back into an exported program."""
    program = program_of(WritesConstant(), (X,))
    tree, eager = program.unflatten(copy=True), WritesConstant()
    eager.foo = program.state["c_foo"].clone()  # torch.export itself has written to the model's own
    for _ in range(2):
        assert torch.equal(tree(X), eager(X))
    with pytest.raises(whence.NotExportable, match="the program writes the constant foo"):
        program.to_exported_program()


class Views(nn.Module):
    """Two buffers, one of which is a view of the other."""

    whole: Tensor
    part: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[1:3])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.whole.add_(2)
        between = self.part * 10
        self.part.mul_(3)
        return x + self.whole, between


@BOTH_FRONTS
def test_defect_2_buffers_that_are_views_of_one_another(way: str) -> None:
    """A write to a buffer shows in another one that looks into it, both ways, and both stay one memory."""
    tree = unflattened(exported(Views(), (X,), way=way))
    eager = Views()
    for _ in range(2):
        for found, expected in zip(tree(X), eager(X), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(tree.whole, eager.whole)
        assert torch.equal(tree.part, eager.part)
    assert tree.part.untyped_storage().data_ptr() == tree.whole.untyped_storage().data_ptr()


class Halves(nn.Module):
    left: Tensor
    right: Tensor

    def __init__(self) -> None:
        super().__init__()
        base = torch.zeros(6)
        self.register_buffer("left", base[:4])
        self.register_buffer("right", base[2:])

    def forward(self, x: Tensor) -> Tensor:
        self.left.add_(2)
        return x + self.right


def test_views_of_a_memory_that_nothing_covers_are_refused() -> None:
    """Buffers that overlap, and none of which covers the other, are refused by name."""
    with pytest.raises(whence.UnsupportedGraph, match="left, right look into one memory"):
        whence.from_exported_program(exported(Halves(), (X,)))


class ReshapesCopies(nn.Module):
    """A reshape that copies, and one that does not, of a value that is written afterwards."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1
        copied = y.t().reshape(-1)
        looked = y.reshape(-1)
        y.add_(1)
        return copied * 1, looked * 1


@EVERY_WAY
def test_reshape_that_copies_does_not_see_a_write(way: str) -> None:
    """Whether `reshape` looks or copies is settled by the layout."""
    tree_of(ReshapesCopies(), (X,), way=way)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.instance(self.batch(x).unsqueeze(-1).expand(2, 4, 3))


@pytest.mark.sample(4)
@EVERY_WAY
@pytest.mark.parametrize("training", [True, False])
def test_running_statistics(way: str, training: bool) -> None:
    """Normalisations in training write their statistics, which no schema says."""
    tree = tree_of(Norms().train(training), (X,), way=way)
    assert tree.training is training


class DrawsInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.copy_(x)
        y[0] += 1
        return torch.nn.functional.dropout(y, 0.5, training=True, inplace=True)


@EVERY_WAY
def test_writes_through_views_of_values(way: str) -> None:
    """Writes to a value through a view of it, and in place by a composite operation."""
    tree_of(DrawsInPlace(), (X,), way=way)


@torch.library.custom_op("whence_interop::add_one_", mutates_args={"x"})
def add_one(x: Tensor) -> None:
    """An operator that writes, and has no functional form of its own."""
    x.add_(1)


@add_one.register_fake
def _(x: Tensor) -> None:
    return None


class WritesByOperator(nn.Module):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        add_one(self.total)
        return x + self.total


@pytest.mark.parametrize("way", ["non-strict", "decomposed"])
def test_operator_that_writes(way: str) -> None:
    """A custom operator that writes runs on copies, whether PyTorch wrapped it or nobody did."""
    tree_of(WritesByOperator(), (X,), way=way)
