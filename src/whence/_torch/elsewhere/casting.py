"""What autocast casts on a device that is not here: C++ casts by its own rules, once it is told the device.

Where a function runs under autocast, C++ asks of each tensor for its device before it casts. It asks the same
where autograd notes what an operation gave, and would look for the device's streams there: of what came out
last, until autograd has its node, it is told what it is told elsewhere. Leaves get their node beforehand.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from whence._torch.pytrees import tree_flatten

_KEYS = {"cuda": torch._C.DispatchKey.AutocastCUDA}


class Casting:
    """Follows, on a device of this `kind`, the function that runs and the operation that it is at."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._casts = False
        self._new: tuple[Tensor, ...] = ()
        self._leaves: dict[int, GradientEdge] = {}

    def forget(self) -> None:
        """Let go of the leaves of a capture."""
        self._leaves.clear()

    @contextmanager
    def around(self, *given: Any) -> Iterator[None]:
        """A function runs, with what it is given; others may run inside of it."""
        before, casts = (self._casts, self._new), torch.is_autocast_enabled(self._kind)
        self._casts, self._new = False, ()
        for tensor in _tensors(given) if casts and torch.is_grad_enabled() else ():
            if tensor.is_leaf and tensor.requires_grad:  # each time: another may be behind it in another run
                self._leaves[id(tensor)] = get_gradient_edge(tensor)
        self._casts = casts
        try:
            yield
        finally:
            self._casts, self._new = before

    def run(self, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What an operation gives that C++ calls for the function."""
        if not self._casts:
            return operation(*args, **kwargs)
        is_followed = torch.is_grad_enabled() and any(map(self._has_history, _tensors((args, kwargs))))
        self._casts = False
        try:
            result = operation(*args, **kwargs)
        finally:
            self._casts = True
        self._new = tuple(_tensors(result)) if is_followed else ()
        return result

    def asks(self, tensor: Tensor) -> bool:
        """Whether C++ asks for the device of a tensor to know if it is to be cast."""
        if not self._casts or not torch._C._dispatch_tls_is_dispatch_key_excluded(_KEYS[self._kind]):
            return False
        return not self._is_new(tensor) or tensor.grad_fn is not None

    def _is_new(self, tensor: Tensor) -> bool:
        return any(tensor is each for each in self._new)

    def _has_history(self, tensor: Tensor) -> bool:
        """Whether autograd will note what comes of a tensor."""
        return tensor.requires_grad or self._is_new(tensor)

    def cast(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments as they arrive at a function that a rule of ours runs in the place of C++'s."""
        if function not in CAST or not torch.is_autocast_enabled(self._kind):
            return args, kwargs
        kind = CAST[function] or torch.get_autocast_dtype(self._kind)
        return [self._as(kind, each) for each in args], {
            key: self._as(kind, each) for key, each in kwargs.items()
        }

    def _as(self, kind: torch.dtype, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != self._kind:
            return value
        is_cast = value.is_floating_point() and value.dtype not in (torch.float64, kind)
        return value.to(kind) if is_cast else value


CAST: Mapping[Any, torch.dtype | None] = MappingProxyType(
    {F.scaled_dot_product_attention: None, F.rms_norm: torch.float32, torch.rms_norm: torch.float32}
)
"""To what autocast on CUDA casts floating arguments of functions that have rules, None for its own dtype:
`aten/src/ATen/autocast_mode.h`."""


def _tensors(values: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor))
