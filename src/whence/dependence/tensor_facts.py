"""What decides how an operation treats a tensor, apart from its numbers."""

from typing import Any

import torch
from torch import Tensor

from whence._torch.sizes.symbols import comparable, has_open_sizes
from whence._torch.tensors import attributes_set_on

Facts = tuple[Any, ...]
_PLAIN = (type(None), bool, int, float, complex, str)


def facts_of(tensor: Tensor) -> Facts:
    """Everything about a tensor that a model can look at without its numbers; torch functions must be off."""
    sizes = _sizes if has_open_sizes(tensor) else _plain_sizes
    shape, strides, offset = sizes(tensor)
    return (
        type(tensor),
        shape,
        tensor.dtype,
        tensor.device,
        tensor.layout,
        strides,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        offset,
        tensor.is_leaf and tensor.grad is not None,
        tuple(map(_attribute, attributes_set_on(tensor).items())) if tensor.__dict__ else (),
    )


def _plain_sizes(tensor: Tensor) -> tuple[Any, Any, Any]:
    offset = tensor.storage_offset() if tensor.layout is torch.strided else 0
    return tensor.shape, tensor.stride(), offset


def _sizes(tensor: Tensor) -> tuple[Any, Any, Any]:
    shape, strides, offset = _plain_sizes(tensor)
    return comparable(shape), comparable(strides), comparable((offset,))


def _attribute(item: tuple[str, Any]) -> tuple[str, type, Any]:
    """An attribute that somebody has set on a tensor; what cannot be compared is only like itself."""
    name, value = item
    return name, type(value), repr(value) if type(value) in _PLAIN else id(value)


NAMES = (
    *("class", "shape", "dtype", "device", "layout", "strides", "requires_grad"),
    *("place in the autograd graph", "conjugate bit", "negative bit", "inference mode", "storage offset"),
    *("gradient that it holds", "set of attributes"),
)


def difference(before: Facts, now: Facts) -> str:
    """The first thing in which two tensors differ, in words."""
    name, was, found = next(row for row in zip(NAMES, before, now, strict=True) if row[1] != row[2])
    return f"its {name} is {found}, not {was}"
