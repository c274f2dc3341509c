"""What decides how an operation treats a tensor, apart from its numbers."""

from typing import Any

from torch import Tensor

Facts = tuple[Any, ...]


def facts_of(tensor: Tensor) -> Facts:
    """Everything about a tensor that a model can look at without its numbers; torch functions must be off."""
    return (
        type(tensor),
        tensor.shape,
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


NAMES = (
    *("class", "shape", "dtype", "device", "layout", "strides", "requires_grad"),
    *("place in the autograd graph", "conjugate bit", "negative bit", "inference mode"),
)


def difference(before: Facts, now: Facts) -> str:
    """The first thing in which two tensors differ, in words."""
    name, was, found = next(row for row in zip(NAMES, before, now, strict=True) if row[1] != row[2])
    return f"its {name} is {found}, not {was}"
