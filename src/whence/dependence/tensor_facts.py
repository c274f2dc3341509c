"""What decides how an operation treats a tensor, apart from its numbers."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from whence._torch.elsewhere.target import class_meant
from whence._torch.fakes import FakeTensor
from whence._torch.plain_values import PLAIN
from whence._torch.sizes.symbols import comparable, has_open_sizes
from whence._torch.tensors import attributes_set_on
from whence.program.guards.expectations import TensorFacts

AllFacts = tuple[Any, ...]


def facts_of(tensor: Tensor) -> TensorFacts:
    """What operations ask of a tensor; torch functions must be off where nobody should see it being asked."""
    shapeless = tensor.is_nested or is_lazy(tensor)
    shape: tuple[Any, ...] = () if shapeless else tensor.shape
    strides: Any = tensor.stride() if tensor.layout is torch.strided and not shapeless else None
    if has_open_sizes(tensor):
        shape, strides = comparable(shape), None if strides is None else comparable(strides)
    kind, device = type(tensor), tensor.device
    kind = class_meant(tensor) if kind is FakeTensor else kind
    return TensorFacts(kind, shape, tensor.dtype, device, tensor.layout, strides, tensor.requires_grad)


def all_facts_of(tensor: Tensor) -> AllFacts:
    """Everything about a tensor that a model can look at without its numbers; torch functions must be off."""
    is_leaf, offset = tensor.is_leaf, tensor.storage_offset() if tensor.layout is torch.strided else 0
    return (
        *facts_of(tensor),
        is_leaf,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        *(comparable((offset,)) if has_open_sizes(tensor) else (offset,)),
        is_leaf and tensor.grad is not None,
        tuple(map(_attribute_fact, attributes_set_on(tensor).items())) if tensor.__dict__ else (),
    )


def _attribute_fact(item: tuple[str, Any]) -> tuple[str, type, Any]:
    """An attribute that somebody has set on a tensor; what cannot be compared is only like itself."""
    name, value = item
    return name, type(value), repr(value) if type(value) in PLAIN else id(value)


NAMES = (
    *("class", "shape", "dtype", "device", "layout", "strides", "requires_grad"),
    *("place in the autograd graph", "conjugate bit", "negative bit", "inference mode", "storage offset"),
    *("gradient that it holds", "set of attributes"),
)


def first_difference(before: AllFacts, now: AllFacts) -> str:
    """The first thing in which two tensors differ, in words."""
    name, was, found = next(row for row in zip(NAMES, before, now, strict=True) if row[1] != row[2])
    return f"its {name} is {found}, not {was}"
