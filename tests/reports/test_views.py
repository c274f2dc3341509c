"""A reshape whose copy depends on sizes counts as what it is at those that are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from tests.models import case


class Turned(nn.Module):
    """What `exp` keeps is not in the order in which the second product reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = self.second(self.first(x).exp().transpose(0, 1).reshape(-1, 8))
        return turned


class Straight(Turned):
    """A reshape that never copies."""

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.second(self.first(x).exp().reshape(-1, 8))
        return rows


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def kept_by_eager(model: nn.Module, x: Tensor) -> int:
    given = {value.untyped_storage().data_ptr() for value in (*model.parameters(), x)}
    kept: dict[int, Tensor] = {}

    def pack(value: Tensor) -> Tensor:
        kept.setdefault(value.untyped_storage().data_ptr(), value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        _result = loss(model(x))
    return sum(value.untyped_storage().nbytes() for place, value in kept.items() if place not in given)


def counted(program: Any, sizes: dict[str, int] | None = None) -> tuple[int, int, int, int]:
    """Bytes: kept, at the peak, written and read."""
    memory, total = program.memory(sizes=sizes), program.cost(sizes=sizes).total
    return memory.kept_bytes, memory.peak, total.written, total.read


@pytest.mark.parametrize("make", [Turned, Straight])
def test_a_reshape_counts_as_what_it_is_at_the_sizes_given(make: type[Turned]) -> None:
    """As in a capture at these sizes, and as what autograd saves; a size of 1 makes a view of a copy."""
    model, dims = make(), {0: Dim("b", max=64), 1: Dim("l", max=64)}
    program = whence.capture(model, (torch.randn(4, 6, 8),), backward=loss, dynamic_shapes=(dims,))
    for b, l in ((4, 6), (2, 2), (13, 5), (1, 7), (9, 1)):  # noqa: E741 - the name of the size
        x, sizes = torch.randn(b, l, 8), {"b": b, "l": l}
        assert counted(program, sizes) == counted(whence.capture(model, (x,), backward=loss)), sizes
        memory = program.memory(sizes=sizes)
        assert memory.kept_bytes == kept_by_eager(model, x)
        if min(b, l) > 1:
            assert eval(memory.formulas["kept bytes"], dict(sizes)) == memory.kept_bytes
            written = program.cost(sizes=sizes).formulas["bytes written"]
            assert eval(written, dict(sizes)) == program.cost(sizes=sizes).total.written


def test_so_does_a_copy_that_makes_contiguous() -> None:
    """It is its argument where that is contiguous."""
    dims = {0: Dim("rows", max=64), 1: Dim("columns", max=64)}
    program = whence.capture(
        lambda x: x.exp().T.contiguous() * 2, (torch.randn(3, 6),), dynamic_shapes=(dims,)
    )
    assert torch.ops.aten.contiguous.default in {node.target for node in program.graph.nodes}
    for rows, columns in ((3, 6), (5, 5), (1, 4)):
        fixed = whence.capture(lambda x: x.exp().T.contiguous() * 2, (torch.randn(rows, columns),))
        assert counted(program, {"rows": rows, "columns": columns}) == counted(fixed)


def test_there_is_no_formula_where_sizes_decide_whether_there_is_a_copy() -> None:
    """A square that was turned twice is a view; that is said, and numbers are those of the sizes given."""
    dims = {0: Dim("rows", min=2, max=64), 1: Dim("columns", min=2, max=64)}
    example = torch.randn(3, 6)

    def turned(x: Tensor) -> Tensor:
        return x.exp().T.reshape(x.shape[0], -1) * 2

    program = whence.capture(turned, (example,), dynamic_shapes=(dims,))
    memory, cost = program.memory(), program.cost()
    assert len(memory.undecided) == 1 and cost.undecided == memory.undecided
    assert memory.formulas == memory.peaks == {} and set(cost.formulas) == {"forward FLOPs"}
    for text in (str(memory), str(cost)):
        assert f"sizes decide whether there is a copy at {memory.undecided[0]}" in text
    assert cost.to_dict()["undecided"] == list(memory.undecided)
    for rows, columns in ((3, 6), (4, 4)):
        fixed = whence.capture(turned, (torch.randn(rows, columns),))
        assert counted(program, {"rows": rows, "columns": columns}) == counted(fixed)


def test_a_report_decides_nothing_of_sizes() -> None:
    """What a program requires of its sizes is the same before and after."""
    dims = {0: Dim("b", max=64), 1: Dim("l", max=64)}
    program = whence.capture(Turned(), (torch.randn(4, 6, 8),), backward=loss, dynamic_shapes=(dims,))
    environment = program.node("x").meta["val"].shape[0].node.shape_env
    before = len(environment.guards), dict(environment.replacements), dict(environment.var_to_range)
    program.report(sizes={"b": 1, "l": 3})
    program.report()
    assert (len(environment.guards), environment.replacements, environment.var_to_range) == before


def copied(program: Any, cost: Any) -> int:
    """Bytes that copies write."""
    copies = (torch.ops.aten.clone.default, torch.ops.aten.reshape.default)
    return sum(row.written for row in cost.nodes if program.node(row.name).target in copies)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_models_with_open_sizes_count_as_those_with_fixed_ones(name: str) -> None:
    """Kept and written, at the example's sizes and at others: both go eager's way."""
    found = case(name)
    model, args, kwargs = found.make()
    free = {0: Dim("batch", min=2), 1: Dim("length", min=2, max=64)}
    shapes: dict[str, Any] = {
        key: free if isinstance(value, Tensor) else None for key, value in kwargs.items()
    }
    if name == "t5":
        shapes["labels"] = {0: free[0], 1: Dim("wanted", min=2, max=64)}
    program = whence.capture(
        model, args, kwargs, backward=found.loss, dynamic_shapes=shapes, decide="example"
    )
    for repeats in (1, 2):
        given = {
            key: value.repeat(repeats, 1) if isinstance(value, Tensor) else value
            for key, value in kwargs.items()
        }
        (batch, length), wanted = given["input_ids"].shape, given["labels"].shape[1]
        sizes = {"batch": batch, "length": length, **({"wanted": wanted} if name == "t5" else {})}
        fixed = whence.capture(model, args, given, backward=found.loss, decide="example")
        memory, cost = program.memory(sizes=sizes), program.cost(sizes=sizes)
        assert memory.kept_bytes == fixed.memory().kept_bytes
        assert copied(program, cost) == copied(fixed, fixed.cost()) > 0
        assert name == "llama" or cost.total.written == fixed.cost().total.written  # that one asks for values
        assert eval(memory.formulas["kept bytes"], dict(sizes)) == memory.kept_bytes
        assert eval(cost.formulas["bytes written"], dict(sizes)) == cost.total.written
