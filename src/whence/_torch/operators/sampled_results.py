"""What operators give on sizes that are symbols, found on numbers in their place.

PyTorch's fake kernels follow an operator with sympy, comparison by comparison. Where it is clear what sizes
the result has, there is nothing to find out but the dtype and the order of the dimensions in memory, and the
kernel of meta tensors says that of any numbers. Everything else is PyTorch's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import snapshot_fake

from whence._torch.fakes import fake_like
from whence._torch.operators.fake_layouts import contiguous_on_cpu
from whence._torch.operators.table import fake_kernel, said_of
from whence._torch.plain_values import PLAIN
from whence._torch.sizes.symbols import SYMBOLIC, comparable, expression, has_open_sizes

_PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197)
"""Numbers in the place of symbols, above any that a kernel is likely to compare sizes with."""


class _Uncommon(Exception):
    """PyTorch's kernel is to look at it."""


@dataclass(frozen=True)
class _Sample:
    """A fake tensor, its sizes as they can be compared, and its layout with numbers for the symbols."""

    tensor: FakeTensor
    sizes: tuple[Any, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Samples:
    """Finds results for the fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._numbers: dict[Any, int] = {}
        self._symbols: dict[Any, int] = {}

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What an operator gives; None where PyTorch's fake kernel has to say it."""
        rule = said_of(func).layout
        if kwargs or rule is contiguous_on_cpu or not (keeps_sizes(func) or said_of(func).selects_sizes):
            return None  # that rule asks where tensors are
        samples: list[_Sample] = []

        def on_meta(value: Any) -> Tensor:
            samples.append(sample := self._sample(value))
            return torch.empty_strided(sample.shape, sample.strides, dtype=value.dtype, device="meta")

        try:
            if not any(has_open_sizes(value) for value in _flat_items(args)):
                return None
            with unset_fake_temporarily():
                given = [_each(value, on_meta) for value in args]
                sizes = _together(samples) if keeps_sizes(func) else None
                found = fake_kernel(func)(*given)
                found = found if rule is None else rule(tuple(given), found)
            return self._like(found, sizes or _selected_sizes(found, samples), samples)
        except _Uncommon:
            return None

    def _sample(self, value: Any) -> _Sample:
        if type(value) is not FakeTensor or value.layout is not torch.strided:
            raise _Uncommon
        numbers = self._numbers_of(value.shape), self._numbers_of(value.stride())
        sample = _Sample(value, comparable(value.shape), *numbers)
        if value.is_conj() or value.is_neg() or not _has_one_order(sample):
            raise _Uncommon
        return sample

    def _numbers_of(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        return tuple([self._number(size) if type(size) in SYMBOLIC else size for size in sizes])

    def _number(self, size: Any) -> int:
        """The number in the place of a size: that of its expression."""
        if not size.node.has_hint():
            raise _Uncommon
        found = expression(size)
        if found not in self._numbers:
            self._numbers[found] = self._evaluated(found)
        return self._numbers[found]

    def _evaluated(self, found: Any) -> int:
        for symbol in found.free_symbols:
            if symbol not in self._symbols and len(self._symbols) == len(_PRIMES):
                raise _Uncommon
            self._symbols.setdefault(symbol, _PRIMES[len(self._symbols)])
        number = found.xreplace({symbol: expression(self._symbols[symbol]) for symbol in found.free_symbols})
        if not number.is_Integer or number < 2:
            raise _Uncommon
        return int(number)

    def _like(self, found: Tensor, sizes: Sequence[Any], samples: Sequence[_Sample]) -> Tensor:
        layout = comparable(sizes), found.stride()
        alike = next((row.tensor for row in samples if (row.sizes, row.strides) == layout), None)
        if alike is not None and alike.dtype == found.dtype:
            return snapshot_fake(alike)  # type: ignore[return-value]
        strides = _strides_over_sizes(found, sizes) if alike is None else alike.stride()
        return fake_like(self._mode, samples[0].tensor, sizes, strides, found.dtype)


@cache
def keeps_sizes(func: Any) -> bool:
    """Whether an operator has one result, new and of the sizes that its arguments have together."""
    if said_of(func).keeps_sizes:
        return True
    returned = [(str(result.type), result.alias_info) for result in func._schema.returns]
    plain = returned == [("Tensor", None)] and func.namespace == "aten" and not func._schema.is_mutable
    return plain and torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags


def _flat_items(args: Sequence[Any]) -> list[Any]:
    return [item for value in args for item in (value if isinstance(value, list) else (value,))]


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in PLAIN:
        return value
    return [_each(item, change) for item in value] if isinstance(value, list) else change(value)


def _together(samples: Sequence[_Sample]) -> list[Any]:
    """The sizes that arguments have together: those longer than 1 along a dimension have one size there."""
    _refuse_devices(samples)
    dims = max(len(row.sizes) for row in samples)
    return [_agreed(samples, dim) for dim in range(-dims, 0)]


def _agreed(samples: Sequence[_Sample], dim: int) -> Any:
    there = (row for row in samples if -dim <= len(row.sizes) and row.sizes[dim] != 1)
    longer = {row.sizes[dim]: row.tensor.shape[dim] for row in there}
    if len(longer) > 1:
        raise _Uncommon
    return next(iter(longer.values()), 1)


def _selected_sizes(found: Tensor, samples: Sequence[_Sample]) -> list[Any]:
    """The sizes of a result, each found among those of the arguments."""
    _refuse_devices(samples)
    known: dict[int, Any] = {1: 1}
    for row in samples:
        for number, like, size in zip(row.shape, row.sizes, row.tensor.shape, strict=True):
            if number in known and comparable([known[number]]) != (like,):
                raise _Uncommon
            known[number] = size
    if not known.keys() >= set(found.shape):
        raise _Uncommon
    return [known[number] for number in found.shape]


def _refuse_devices(samples: Sequence[_Sample]) -> None:
    if len({row.tensor.device for row in samples}) > 1:
        raise _Uncommon


def _has_one_order(row: _Sample) -> bool:
    """Whether the dimensions lie in one order in memory for all sizes: each step holds whole others."""
    pairs = zip(row.strides, row.shape, strict=True)
    steps = sorted(stride for stride, size in pairs if stride and size != 1)
    return all(not longer % step for step, longer in pairwise(steps))


def _strides_over_sizes(found: Tensor, sizes: Sequence[Any]) -> list[Any]:
    """The strides over sizes that are symbols, of a tensor without gaps."""
    order = sorted(range(found.dim()), key=lambda dim: (found.stride(dim), found.shape[dim]))
    strides: list[Any] = [1] * len(sizes)
    step: Any = 1
    number = 1
    for dim in order:
        if found.stride(dim) != number:
            raise _Uncommon
        strides[dim] = step
        number *= found.shape[dim]
        step = step * torch.sym_max(sizes[dim], 1)
    return strides
