"""Whose strides a value has, and values in the memory layout of others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.fake_layouts import is_laid_out_two_ways
from whence._torch.operators.schemas import is_elementwise, missing_defaults
from whence._torch.operators.views import written_into
from whence._torch.sizes.symbols import comparable, is_surely_contiguous
from whence.program.queries.marks import leading_to

aten = torch.ops.aten


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


def laid_out_as(before: fx.Node, value: fx.Node, writer: Callable[..., fx.Node]) -> fx.Node:
    """`value` in the memory of the tensor that is written: other strides can give later readers other last
    bits."""
    if have_one_layout(before, value):
        return value
    return written_into(aten.slice_scatter.default, before, value, writer)


def as_recorded(node: fx.Node, value: fx.Node, writer: Callable[..., fx.Node]) -> fx.Node:
    """What a functional form computes, as the operation itself lays it out: in the order of dimensions, where
    the two differ."""
    if have_one_layout(node, value) or not is_surely_contiguous(node.meta["val"]):
        return value
    return writer(aten.clone.default, value, memory_format=torch.contiguous_format)


def drawn_in_memory_order(twin: Any, node: fx.Node, writer: Callable[..., fx.Node]) -> fx.Node:
    """`bernoulli_` draws in the order of memory, `bernoulli` in the order of dimensions."""
    target: Any = node.target
    tensor, *rest = node.args
    strides = tensor.meta["val"].stride()  # type: ignore[union-attr]
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    kwargs = {**node.kwargs, **missing_defaults(target, twin, node.args, node.kwargs)}
    drawn = writer(twin, writer(aten.permute.default, tensor, order), *rest, **kwargs)
    return writer(aten.permute.default, drawn, [order.index(axis) for axis in range(len(order))])


def as_before(value: fx.Node, tensor: fx.Node, writer: Callable[..., fx.Node]) -> fx.Node:
    """In-place operations keep the dtype and shape of the tensor they write; their twins may not. A gradient
    is first cast back, and then summed."""
    before, now = tensor.meta["val"], value.meta["val"]
    if isinstance(now, Tensor) and now.shape != before.shape:
        value = writer(aten.expand.default, value, list(before.shape))
    if isinstance(now, Tensor) and now.dtype != before.dtype:
        value = writer(aten._to_copy.default, value, dtype=before.dtype)
    return value
