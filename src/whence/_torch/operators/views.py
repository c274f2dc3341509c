"""Write a new value through a view: the inverse of each view operation, as an operation on its base."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten
Call = Callable[..., fx.Node]
"""Appends an operation and returns its node."""
ViewInverse = Callable[[fx.Node, int | None, fx.Node, fx.Node, Call], fx.Node | None]
"""The base with a new value written where a view (its result of that number) looks; None if it cannot be."""


def same(_step: fx.Node, _index: int | None, _base: fx.Node, new: fx.Node, _call: Call) -> fx.Node:
    """Of a view of everything, as it is."""
    return new


def again(step: fx.Node, _index: int | None, _base: fx.Node, new: fx.Node, call: Call) -> fx.Node:
    """Of a view that is its own inverse."""
    return call(step.target, new, *step.args[1:])


def scattered(operator: OpOverload) -> ViewInverse:
    """Of a view of a part, which `operator` writes into the whole."""

    def inverse(step: fx.Node, _index: int | None, base: fx.Node, new: fx.Node, call: Call) -> fx.Node:
        return written_into(operator, base, new, call, *step.args[1:], **step.kwargs)

    return inverse


_WITHOUT_COMPLEX_GRADIENT = (aten.slice_scatter.default, aten.select_scatter.default)


def written_into(
    operator: OpOverload, base: fx.Node, new: fx.Node, call: Call, *place: Any, **named: Any
) -> fx.Node:
    """The base with a new value where `operator` puts it. PyTorch does not differentiate some of these in
    complex numbers, and does in pairs of real ones."""
    if operator not in _WITHOUT_COMPLEX_GRADIENT or not base.meta["val"].is_complex():
        return call(operator, base, new, *place, **named)
    dim, *rest = place or (0,)
    pairs = [call(aten.view_as_real.default, _unconjugated(whole, call)) for whole in (base, new)]
    written = call(operator, *pairs, dim % base.meta["val"].dim(), *rest, **named)
    return call(aten.view_as_complex.default, written)


def _unconjugated(value: fx.Node, call: Call) -> fx.Node:
    return call(aten.resolve_conj.default, value) if value.meta["val"].is_conj() else value


def back(operator: OpOverload) -> ViewInverse:
    """Of a view of everything, which `operator` turns back."""

    def inverse(_step: fx.Node, _index: int | None, _base: fx.Node, new: fx.Node, call: Call) -> fx.Node:
        return call(operator, new)

    return inverse


def reshaped(_step: fx.Node, _index: int | None, base: fx.Node, new: fx.Node, call: Call) -> fx.Node:
    """Of a view in another shape."""
    return call(aten.reshape.default, new, list(base.meta["val"].shape))


def retyped(step: fx.Node, _index: int | None, base: fx.Node, new: fx.Node, call: Call) -> fx.Node:
    """Of a view of the same bits as another dtype."""
    return call(step.target, new, base.meta["val"].dtype)


def permuted(step: fx.Node, _index: int | None, _base: fx.Node, new: fx.Node, call: Call) -> fx.Node:
    """Of a view with the dimensions in another order."""
    order: Sequence[int] = step.args[1]  # type: ignore[assignment]
    positive = [axis % len(order) for axis in order]
    return call(step.target, new, [positive.index(axis) for axis in range(len(order))])


def unbound(step: fx.Node, index: int | None, base: fx.Node, new: fx.Node, call: Call) -> fx.Node | None:
    """Of the slices along a dimension."""
    if index is None:
        return None
    dim = step.args[1] if len(step.args) > 1 else 0
    return written_into(aten.select_scatter.default, base, new, call, int(dim), index)  # type: ignore[arg-type]


def split(step: fx.Node, index: int | None, base: fx.Node, new: fx.Node, call: Call) -> fx.Node | None:
    """Of the pieces along a dimension."""
    if index is None:
        return None
    values: list[Any] = list(step.meta["val"])
    dim = int(step.args[2]) if len(step.args) > 2 else 0  # type: ignore[arg-type]
    start = sum(piece.shape[dim] for piece in values[:index])
    end = start + values[index].shape[dim]
    return written_into(aten.slice_scatter.default, base, new, call, dim, start, end)
