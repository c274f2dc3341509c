"""A gradient that arrives in several pieces, and is added piece by piece where the captured backward adds it.

Autograd adds what arrives for a tensor in the order of its arrival, to what others gave before. Adding up the
pieces of one module first would round otherwise.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_ADDS = frozenset({torch.add, torch.ops.aten.add.Tensor})


class Pieces:
    """Stands for the sum of its parts, in the order in which they arrived."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = tuple(parts)

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Any, kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Add one part after the other to what is there; to anything else it is the sum."""
        if func in _ADDS and len(args) == 2 and not kwargs:
            return added(whole(args[0]), args[1])
        return func(*map(whole, args), **(kwargs or {}))

    def onto(self, total: Tensor | None) -> Tensor:
        """`total` with every part added."""
        first, *rest = self._parts if total is None else (total, *self._parts)
        return functools.reduce(torch.add, rest, first)


def added(total: Tensor | None, more: Any) -> Tensor:
    """What is there with what arrives."""
    if isinstance(more, Pieces):
        return more.onto(total)
    return more if total is None else total + more  # type: ignore[no-any-return]


def whole(value: Any) -> Any:
    """The sum of pieces; anything else as it is."""
    return value.onto(None) if isinstance(value, Pieces) else value


def is_added(node: fx.Node, user: fx.Node) -> bool:
    """Whether a user of a gradient adds it to what was there before it."""
    return user.target is torch.ops.aten.add.Tensor and user.args[0] is not node and user.args[1] is node
