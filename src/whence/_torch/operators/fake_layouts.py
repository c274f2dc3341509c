"""Memory layouts that fake kernels get wrong.

A fake tensor with other strides than the real kernel gives leads the model down another path: `reshape` is a
view in the capture and a copy in eager, or the other way round. Each rule says what the CPU kernel does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from whence._torch.sizes.symbols import has_open_sizes
from whence._torch.tensors import storage_of

LayoutRule = Callable[[tuple[Any, ...], Any], Any]
"""From the arguments of a call and the result of its fake kernel to what the real one gives."""


def follows(position: int, argument: int) -> LayoutRule:
    """A result is laid out as an argument is: contiguous, or channels last, never a permutation."""

    def laid_out(args: tuple[Any, ...], result: Any) -> Any:
        found = result[position]
        if not isinstance(found, Tensor):
            return result
        expected = torch.empty_like(found, memory_format=suggest_memory_format(args[argument]))
        if expected.stride() == found.stride():
            return result
        return (*result[:position], expected, *result[position + 1 :])

    return laid_out


def as_on_meta(func: Any) -> LayoutRule:
    """C++ lays out a dimension of size 1 as it comes, and that decides what is channels last."""

    def laid_out(args: tuple[Any, ...], result: Tensor) -> Tensor:
        given = [arg for arg in args if isinstance(arg, Tensor)]
        if any(map(has_open_sizes, (result, *given))) or 1 not in result.shape or all(map(_is_dense, given)):
            return result
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            strides = func(*map(_on_meta, args)).stride()
        if strides == result.stride():
            return result
        if storage_of(result) == storage_of(args[0]):
            return args[0].as_strided(result.shape, strides, result.storage_offset())  # type: ignore[no-any-return]
        return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)

    return laid_out


def is_laid_out_two_ways(tensor: Any) -> bool:
    """Whether a tensor is contiguous and channels last at once, as one of a single pixel can be.

    Which of the two a kernel's new tensor is then, fake kernels do not know, and convolutions go by it.
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or has_open_sizes(tensor):
        return False
    if 1 not in tensor.shape or not tensor.is_contiguous():
        return False
    return suggest_memory_format(tensor) is not torch.contiguous_format


def _on_meta(given: Any) -> Any:
    """An argument without numbers; a number among tensors is a tensor to the kernel, without dimensions."""
    if isinstance(given, Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
    return torch.empty((), device="meta") if isinstance(given, int | float | complex) else given


def _is_dense(given: Tensor) -> bool:
    """Whether the strides are those of a new tensor, also where the size is 1."""
    expected = 1
    for size, stride in zip(reversed(given.shape), reversed(given.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True
