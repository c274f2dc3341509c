"""Whether the result of an operation lies in the memory of its argument.

Most operators always view or never do. A reshape copies where no view has its shape: that is decided by the
sizes and strides it is given, at numbers, or for all sizes at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import MAY_COPY, traits
from whence._torch.sizes.symbols import can_view, open_number, size_at
from whence._torch.subclasses.wrapper_subclasses import is_composed

aten = torch.ops.aten
_UNSAID = frozenset((aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk))
_LAST = {torch.channels_last: (0, 2, 3, 1), torch.channels_last_3d: (0, 2, 3, 4, 1)}


def viewed_argument(node: fx.Node, sizes: Mapping[str, int]) -> int | None:
    """The argument in whose memory the result lies at these sizes; schemas of a few do not say so."""
    if getattr(node.target, "overloadpacket", None) in _UNSAID:
        return 0
    return traits(node.target).viewed if _is_view(node, sizes) else None


def depends_on_sizes(node: fx.Node, sizes: Mapping[str, int]) -> bool:
    """Whether the result may lie elsewhere than at these sizes at others of two and more."""
    return node.target in MAY_COPY and _is_view(node, sizes) is not _is_view(node, None)


def undecided_line(names: Sequence[str]) -> str:
    """Why there are no formulas."""
    return f"no formulas of bytes: sizes decide whether there is a copy at {', '.join(names)}"


def _is_view(node: fx.Node, sizes: Mapping[str, int] | None) -> bool | None:
    """At these sizes; without any at all of two and more, and None where it is not the same at all."""
    given: Any = node.args[0] if node.target in MAY_COPY else None
    source, result = (None if each is None else each.meta.get("val") for each in (given, node))
    if not _is_plain(source) or not _is_plain(result):
        return True
    shape, strides, wanted = (
        [open_number(size) if sizes is None else int(size_at(size, sizes)) for size in row]
        for row in (source.shape, source.stride(), result.shape)
    )
    if node.target is not aten.contiguous.default:
        return can_view(shape, strides, wanted)
    layout: Any = node.kwargs.get("memory_format", torch.contiguous_format)
    order = _LAST.get(layout, range(len(shape)))
    return can_view([shape[dim] for dim in order], [strides[dim] for dim in order], None)


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_composed(value)
