"""Tensors that lie on the device for a while: each itself, so that whoever holds one finds it there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence._torch.tensors import MISSED

_CLASS: Any = vars(object)["__class__"]
"""What classes say of their instances may be put aside; this is not."""


@dataclass(frozen=True)
class _Object:
    """What a tensor is to Python: its class, and what was set on it."""

    tensor: Tensor
    kind: type
    held: dict[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Object":
        return cls(tensor, _CLASS.__get__(tensor), vars(tensor))

    def become(self, kind: type, held: dict[str, Any]) -> None:
        _CLASS.__set__(self.tensor, kind)
        object.__setattr__(self.tensor, "__dict__", held)


@dataclass(frozen=True)
class _Pair:
    """A tensor and the twin that it is for a while; `memory` is what was behind the tensor."""

    ours: _Object
    twin: _Object
    memory: int

    @classmethod
    def of(cls, tensor: Tensor, twin: Tensor) -> "_Pair":
        return cls(_Object.of(tensor), _Object.of(twin), _memory_of(tensor))

    def make(self) -> None:
        torch._C._swap_tensor_impl(self.ours.tensor, self.twin.tensor)
        self.ours.become(self.twin.kind, {MISSED: set(), **self._held_there()})
        self.twin.become(self.ours.kind, {})

    def undo(self) -> None:
        """Harmless where it was never made, or is undone."""
        tensor = self.ours.tensor
        if _memory_of(tensor) != self.memory:
            _without_hooks(tensor)
            torch._C._swap_tensor_impl(tensor, self.twin.tensor)
        self.ours.become(self.ours.kind, self.ours.held)
        self.twin.become(self.twin.kind, self._held_there())

    def _held_there(self) -> dict[str, Any]:
        """What makes a fake one, and what somebody has put on the tensor."""
        return {**self.ours.held, **self.twin.held}


class TwinsInPlace:
    """Tensors that are exchanged for their twins, which no tensor with hooks is; `twins` by identity."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        rows = [_Pair.of(*pair) for pair in pairs]
        self._rows = rows
        self.twins: Mapping[int, Tensor] = {id(row.ours.tensor): row.twin.tensor for row in rows}

    def put(self) -> None:
        """From now on each is on the device, with a gradient where it has one."""
        for row in self._rows:
            tensor, twin = row.ours.tensor, row.twin.tensor
            if tensor.is_leaf and tensor.grad is not None:
                twin.grad = self.twins[id(tensor.grad)]
        for row in self._rows:
            row.make()

    def give_back(self) -> None:
        """All are as they were, whatever of it had been done."""
        for row in reversed(self._rows):
            row.undo()
        for row in self._rows:
            row.twin.tensor.grad = None


def _memory_of(tensor: Tensor) -> int:
    return int(tensor._cdata)


def _without_hooks(tensor: Any) -> None:
    """Let go of hooks that were put on it meanwhile: Python would take them for those of what it is then."""
    if tensor._backward_hooks is not None:
        tensor._backward_hooks = None
    if tensor._post_accumulate_grad_hooks is not None:
        tensor._post_accumulate_grad_hooks = None
