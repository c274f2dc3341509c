"""Values that lie in memory as kernels rely on, because what calls them in eager mode makes it so.

Where such a value was contiguous at capture there was nothing to record; a run may have it otherwise: the
gradient of a result, or what a module gives that took the place of another.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from whence._torch.operators.table import said_of
from whence._torch.sizes.exported_sizes import order_of
from whence.program.node_records import origin_of
from whence.schema import InputKind, Phase

if TYPE_CHECKING:
    from whence.program.program import FlatProgram

_TAKEN = (InputKind.USER, InputKind.PARAMETER, InputKind.BUFFER)
Order = tuple[int, ...]
"""Dimensions, the one of the largest steps in memory first."""


def in_any_layout(program: "FlatProgram") -> frozenset[str]:
    """The inputs that a program takes as they lie, by name."""
    free = program.convention.any_layout
    return frozenset(row.name for row in program.signature.inputs_of(*_TAKEN) if row.path in free)


def gathered(node: fx.Node) -> Iterator[tuple[int, Order]]:
    """The arguments that are contiguous when a kernel reads them, with the order of their dimensions."""
    row = said_of(node.target)
    positions = row.gathers
    if row.gathers_gradients and origin_of(node).phase is Phase.BACKWARD:
        positions += row.gathers_gradients
    for position in positions:
        argument = node.args[position] if position < len(node.args) else None
        order = order_if_dense(argument.meta.get("val")) if isinstance(argument, fx.Node) else None
        if order is not None:
            yield position, order


def with_gathered(node: fx.Node, args: Sequence[Any]) -> list[Any]:
    """The arguments of an operation in a run, as its kernel reads them."""
    found = list(args)
    for position, order in gathered(node):
        found[position] = in_memory_order(found[position], order)
    return found


def order_if_dense(value: Any) -> Order | None:
    """In which order the dimensions of a tensor lie in memory, where it fills its memory."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.dim() < 2:
        return None
    order = order_of(value)
    return order if value.permute(order).is_contiguous() else None


def in_memory_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """A tensor whose dimensions lie in memory one after the other, in this order."""
    back = [order.index(axis) for axis in range(len(order))]
    if back == list(order) == list(range(len(order))):
        return tensor.contiguous()
    return tensor.permute(list(order)).contiguous().permute(back)
