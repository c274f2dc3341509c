"""A Python value becomes what a guard expects: by value where that is possible, by identity where not."""

import enum
import functools
import numbers
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from whence._torch.sharding import class_as_written
from whence.program.expectations import (
    Constant,
    Entries,
    Expectation,
    Function,
    Held,
    Items,
    Reference,
    TensorFacts,
)

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), re.Pattern),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    }
)
_NUMBERS = ("numpy", "decimal", "fractions")
_BY_NAME = (enum.Enum, types.ModuleType, type)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType)
_DEEPEST = 20


class Describer:
    """Describes the values of one capture: holders and tensors keep their numbers.

    `lasting` gives, by identity, what is described in the place of a tensor that is there for a while only.
    """

    def __init__(self, holders: Mapping[int, int], lasting: Mapping[int, Tensor] | None = None) -> None:
        self._holders = holders
        self._lasting = lasting or {}
        self._tensors: dict[int, int] = {}
        self._kept: list[object] = []

    def describe(self, value: Any, depth: int = 0) -> Expectation:
        """What a guard expects in the place of `value`."""
        number = self._holders.get(id(value))
        if number is not None:
            return Held(number, class_as_written(type(value)))
        if isinstance(value, Tensor):
            return self.tensor(value)
        if is_constant(value):
            return Constant(value)
        if depth < _DEEPEST and (inside := self._container(value, depth + 1)) is not None:
            return inside
        return self._function(value, depth + 1) if depth < _DEEPEST else reference(value)

    def tensor(self, tensor: Tensor) -> TensorFacts:
        """The facts about a tensor, with its number."""
        tensor = self._lasting.get(id(tensor), tensor)
        self._kept.append(tensor)
        number = self._tensors.setdefault(id(tensor), len(self._tensors))
        return tensor_facts(tensor, number)

    def _container(self, value: Any, depth: int) -> Expectation | None:
        if isinstance(value, dict):
            items = tuple(self.describe(item, depth) for item in value.values())
            return Entries(type(value), tuple(value), items)
        if isinstance(value, list | tuple | deque):
            return Items(type(value), tuple(self.describe(item, depth) for item in value))
        if isinstance(value, weakref.ref):
            return Items(weakref.ref, (self.describe(value(), depth),))
        if isinstance(value, set | frozenset) and all(map(is_constant, value)):
            return Constant(frozenset(value)) if isinstance(value, frozenset) else Constant(set(value))
        return None

    def _function(self, value: Any, depth: int) -> Expectation:
        function = function_of(value)
        if function is None:
            return reference(value)
        target, owner, fixed = function
        closure = tuple(self.describe(item, depth) for item in closure_of(target))
        if fixed is None:
            return Function(target, owner, closure=closure)
        keywords = tuple((key, self.describe(item, depth)) for key, item in fixed.keywords.items())
        arguments = tuple(self.describe(item, depth) for item in fixed.args)
        return Function(target, owner, arguments, keywords, closure)


def is_constant(value: object) -> bool:
    """Whether equality of type and value decides: Python's numbers and texts, torch's descriptions.

    Classes derived from these may compare as they like, and are not constants.
    """
    kind = type(value)
    return (
        kind in _PLAIN
        or isinstance(value, _BY_NAME)
        or (kind.__module__ in _NUMBERS and isinstance(value, numbers.Number | Decimal))
    )


def function_of(value: Any) -> tuple[Any, type | None, functools.partial[Any] | None] | None:
    """The function behind a callable: itself, the class of the object it is bound to, and a partial's own
    arguments."""
    if isinstance(value, types.MethodType):
        return value.__func__, type(value.__self__), None
    if isinstance(value, functools.partial):
        inner = function_of(value.func)
        return (value.func, None, value) if inner is None else (inner[0], inner[1], value)
    if isinstance(value, _FUNCTIONS):
        return value, None, None
    return None


def closure_of(function: Any) -> list[Any]:
    """Defaults and outer variables of a function made inside another; nothing for one that stands alone."""
    if not isinstance(function, types.FunctionType) or "<locals>" not in function.__qualname__:
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]


def _is_filled(cell: types.CellType) -> bool:
    return cell != types.CellType()


def tensor_facts(tensor: Tensor, number: int = -1) -> TensorFacts:
    """Everything about a tensor but its numbers; strides where they are not the plain ones."""
    return TensorFacts(
        type=type(tensor),
        shape=tensor.shape,
        dtype=tensor.dtype,
        device=tensor.device,
        strides=tensor.stride() if tensor.layout is torch.strided else None,
        requires_grad=tensor.requires_grad,
        number=number,
    )


def reference(value: object) -> Reference:
    """Identity, without keeping the object alive where it can be helped."""
    kind = type(value)
    return Reference(_weakly(value), kind, f"a {kind.__name__}")


def _weakly(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:  # objects without a place for weak references are kept
        return lambda: value
