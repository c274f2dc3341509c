"""Whose strides a value has."""

from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.fake_layouts import is_laid_out_two_ways
from whence._torch.operators.schemas import is_elementwise
from whence._torch.sizes.symbols import comparable
from whence.program.queries.marks import leading_to


def inputs_behind(node: fx.Node) -> set[str]:
    """The placeholders from which a value has its layout, through element-wise operations alone.

    Any other operation depends on the layout of its arguments by itself.
    """
    behind = leading_to([node], through=lambda value: is_elementwise(value.target))
    return {value.name for value in behind if value.op == "placeholder"}


def have_one_layout(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values of one shape are sure to lie in memory alike; nothing is decided about sizes that
    vary."""
    value = node.meta["val"]
    return _counting_strides(value) == _counting_strides(other.meta["val"]) and not is_laid_out_two_ways(
        value
    )


def _counting_strides(value: Any) -> list[Any]:
    """The strides along which there is more than one element; none where strides say nothing."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return []
    shape, strides = comparable(value.shape), comparable(value.stride())
    return [] if 0 in shape else [stride for size, stride in zip(shape, strides, strict=True) if size != 1]
