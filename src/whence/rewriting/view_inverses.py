"""Write a new value through a view: the inverse of each view operation, as an operation on its base."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from whence._torch.operators.schemas import OpOverload

aten = torch.ops.aten
Call = Callable[..., fx.Node]
"""Appends an operation and returns its node."""

_IDENTITY = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default})
_SELF_INVERSE = frozenset({aten.t.default, aten.transpose.int})
_SCATTERS: dict[OpOverload, OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._reshape_alias.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    }
)
_PAIRS: dict[OpOverload, OpOverload] = {
    aten.view_as_real.default: aten.view_as_complex.default,
    aten.view_as_complex.default: aten.view_as_real.default,
}


def inverse_of(step: fx.Node, index: int | None, base: fx.Node, new: fx.Node, call: Call) -> fx.Node | None:
    """The base with `new` written where `step` (its `index`-th result) looks; None if no rule is known."""
    target, rest = step.target, step.args[1:]
    if target in _IDENTITY:
        return new
    if target in _SELF_INVERSE:
        return call(target, new, *rest)
    if target in _SCATTERS:
        return call(_SCATTERS[target], base, new, *rest, **step.kwargs)
    if target in _RESHAPES:
        return call(aten.reshape.default, new, list(base.meta["val"].shape))
    if target in _PAIRS:
        return call(_PAIRS[target], new)
    if target is aten.permute.default:
        return call(target, new, _inverse_permutation(rest[0]))  # type: ignore[arg-type]
    if target is aten.view.dtype:
        return call(target, new, base.meta["val"].dtype)
    return None if index is None else _piece_written(step, index, base, new, call)


def _inverse_permutation(order: Sequence[int]) -> list[int]:
    positive = [axis % len(order) for axis in order]
    return [positive.index(axis) for axis in range(len(order))]


def _piece_written(step: fx.Node, index: int, base: fx.Node, new: fx.Node, call: Call) -> fx.Node | None:
    """The base with `new` in place of one piece of a split or unbind."""
    values: list[Any] = list(step.meta["val"])
    if step.target is aten.unbind.int:
        dim = step.args[1] if len(step.args) > 1 else 0
        return call(aten.select_scatter.default, base, new, dim, index)
    if step.target in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = int(step.args[2]) if len(step.args) > 2 else 0  # type: ignore[arg-type]
        start = sum(piece.shape[dim] for piece in values[:index])
        return call(aten.slice_scatter.default, base, new, dim, start, start + values[index].shape[dim])
    return None
