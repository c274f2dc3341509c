"""Canaries for open sizes: how torch.export spells them, and what a call makes of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from whence._torch.sizes.exported_sizes import (
    Multiple,
    in_order_of,
    is_number,
    is_open,
    limits_of,
    multiple_of,
    ranges_of,
)


class Adds(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, x]) + y


def opened() -> tuple[list[Any], dict[Any, Any]]:
    rows = Dim("rows", min=2, max=9)
    shapes = {"x": {0: rows}, "y": {0: 2 * rows}}
    program = torch.export.export(Adds(), (torch.ones(3, 4), torch.ones(6, 4)), dynamic_shapes=shapes)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return values, program.range_constraints


def test_open_sizes_are_known() -> None:
    """A tensor is open when one of its sizes is; a size is a number."""
    values, _ = opened()
    assert is_open(values[0])
    assert is_number(values[0].shape[0])
    assert not is_open(torch.ones(2))
    assert not is_open(3)


def test_multiples_are_told_from_other_sizes() -> None:
    """A size is a multiple of one symbol; what is divided by the symbol is none, nor is a power of it."""
    rows = opened()[0][0].shape[0]
    name = str(rows.node.expr)
    assert multiple_of(2 * rows + 1) == Multiple(name, name, 2, 1)
    others = (64 // rows, 64 % rows, rows // 2, rows * rows, 3 - rows)
    assert [multiple_of(other) for other in others] == [None] * len(others)


@pytest.mark.canary("torch.utils._sympy.numbers.int_oo", "torch.utils._sympy.value_ranges.ValueRanges")
def test_limits_go_there_and_back() -> None:
    """Ranges are ValueRanges, and have int_oo where there is no limit."""
    values, ranges = opened()
    limits = limits_of(ranges)
    symbol = values[0].shape[0].node.expr
    assert limits[str(symbol)][1] == 9
    assert ranges_of(values, limits)[symbol].upper == 9
    assert ranges_of(values, {})[symbol] == ranges[symbol]
    assert ranges_of(values, {str(symbol): (0, None)}) == {symbol: ValueRanges(0, int_oo)}


def test_order_in_memory() -> None:
    """A tensor is laid out in the order of dimensions that the capture saw."""
    values, _ = opened()
    transposed = torch.randn(4, 5).t()
    ordered = in_order_of(transposed, values[0].shape, values[0].stride())
    assert ordered.is_contiguous()
    assert torch.equal(ordered, transposed)
