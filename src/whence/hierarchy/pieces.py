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
            return total_of([whole(args[0]), *parts_of(args[1])])
        return func(*map(whole, args), **(kwargs or {}))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What arrived."""
        return self._parts


def parts_of(value: Any) -> tuple[Tensor, ...]:
    """What a gradient is the sum of."""
    return value.parts if isinstance(value, Pieces) else (value,)


def total_of(parts: Sequence[Tensor]) -> Tensor | None:
    """The sum, one part after the other."""
    return functools.reduce(torch.add, parts) if parts else None


def whole(value: Any) -> Any:
    """The sum of pieces; anything else as it is."""
    return total_of(value.parts) if isinstance(value, Pieces) else value


def is_added(node: fx.Node, user: fx.Node) -> bool:
    """Whether a user of a gradient adds it to what was there before it."""
    return user.target is torch.ops.aten.add.Tensor and user.args[0] is not node and user.args[1] is node
