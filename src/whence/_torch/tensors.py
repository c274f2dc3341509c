"""Facts about tensors that have no public spelling."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def untouched(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors back as they were: version counter, gradient history and `requires_grad`.

    A recording replaces tensors below autograd, so an in-place operation on a buffer changes no number but is
    counted and linked above.
    """
    before = [
        (tensor, tensor._version, tensor.requires_grad, tensor.grad_fn)
        for tensor in tensors
        if _counts(tensor)
    ]
    try:
        yield
    finally:
        for tensor, version, required, history in before:
            if tensor.grad_fn is not history:
                tensor.detach_()
            if tensor.requires_grad != required:
                tensor.requires_grad_(required)
            if tensor._version != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _counts(tensor: Tensor) -> bool:
    return not tensor.is_inference()


def gradient_hooks(tensor: Tensor) -> list[str]:
    """The names of the hooks that see or change the gradient of `tensor`."""
    hooks = (tensor._backward_hooks or {}).values()
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]


def share_memory(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are views of one storage; storages are compared by identity, also without data."""
    return bool(left.untyped_storage()._cdata == right.untyped_storage()._cdata)


def clear_autocast_cache() -> None:
    """Forget weights that autocast has cast, so that neither a capture nor eager meets the other's."""
    torch.clear_autocast_cache()
