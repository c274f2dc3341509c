"""Sizes that torch.export keeps open: which numbers a call gives them, and what it allows."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor

from whence._torch.sizes.symbols import SYMBOLIC, names_in, sizes_in, whole_bound

Limits = tuple[int | None, int | None]


def is_open(value: object) -> bool:
    """Whether a fake tensor has a size or stride, or a number is one, that is not known yet."""
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return any(_is_symbol(size) for size in (*value.shape, *strides))
    return _is_symbol(value)


def _is_symbol(size: object) -> bool:
    return isinstance(size, SYMBOLIC)


_SPECIAL = 2
"""Of every size that nobody named torch.export assumes that it is not less, and checks nothing of it."""


def limits_of(ranges: Mapping[Any, Any]) -> dict[str, Limits]:
    """The smallest and largest value of each symbol that PyTorch checks; None where there is none."""
    limits = {
        symbol: (whole_bound(bounds.lower), whole_bound(bounds.upper)) for symbol, bounds in ranges.items()
    }
    return {
        str(symbol): (None if low is not None and 0 < low <= _SPECIAL else low, high)
        for symbol, (low, high) in limits.items()
    }


@dataclass(frozen=True)
class Multiple:
    """A size that is `scale` times a symbol, and `offset` more.

    The symbol is called `symbol` where limits are kept, and `name` where sizes are spelled.
    """

    symbol: str
    name: str
    scale: int
    offset: int

    @property
    def is_plain(self) -> bool:
        """Whether the size is the symbol itself."""
        return (self.scale, self.offset) == (1, 0)


def multiple_of(size: SymInt) -> Multiple | None:
    """A size as a multiple of a symbol; None where it is made of several, or in another way."""
    found = importlib.import_module("whence._torch.sizes.environment").linear(size.node.expr)
    if found is None or found[1] <= 0:
        return None
    symbol, scale, offset = found
    (name,) = names_in(size)
    return Multiple(str(symbol), name, scale, offset)


def is_number(value: object) -> bool:
    """Whether a number is one whose value the capture left open."""
    return isinstance(value, SymInt)


def ranges_of(values: Iterable[Any], limits: Mapping[str, Limits]) -> dict[Any, Any]:
    """The limits of the symbols in these values, as torch.export keeps them: those given, else their own."""
    sizes = [size for value in values for size in _symbolic_sizes(value)]
    if not sizes:
        return {}
    known_ranges: Any = importlib.import_module("torch.utils._sympy.value_ranges")
    infinity: Any = importlib.import_module("torch.utils._sympy.numbers").int_oo
    own = {symbol: size.node.shape_env for size in sizes for symbol in size.node.expr.free_symbols}
    found = {}
    for symbol in sorted(own, key=str):
        known = own[symbol].var_to_range.get(symbol, known_ranges.ValueRanges(0, infinity))
        own_low, own_high = whole_bound(known.lower), whole_bound(known.upper)
        low, high = limits.get(str(symbol), (own_low, own_high))
        least = own_low if low is None else low
        found[symbol] = known_ranges.ValueRanges(least or 0, infinity if high is None else high)
    return found


def say_where(values: Iterable[Any], texts: Mapping[str, str]) -> None:
    """Say in PyTorch's spelling where the sizes in these values come from, by their names."""
    found = [size.node.shape_env for value in values for size in _symbolic_sizes(value)]
    if not found:
        return
    own = importlib.import_module("whence._torch.sizes.environment").SizeEnvironment
    for environment in {id(held): held for held in found}.values():
        if isinstance(environment, own):  # one from elsewhere knows
            environment.say_where(texts)


def _symbolic_sizes(value: object) -> list[SymInt]:
    return [size for size in sizes_in(value) if isinstance(size, SymInt)]


def in_order_of(tensor: Tensor, shape: Sequence[Any], strides: Sequence[Any]) -> Tensor:
    """A tensor whose dimensions lie in memory in the order that open sizes and strides say."""
    wanted, found = _order(shape, strides), _order(tensor.shape, tensor.stride())
    lie = [[axis for axis in order if _hint(tensor.shape[axis]) > 1] for order in (wanted, found)]
    if lie[0] == lie[1]:
        return tensor
    ordered = tensor.permute(wanted).contiguous()
    return ordered.permute([wanted.index(axis) for axis in range(len(wanted))])


def like(value: Any) -> Any:
    """Zeros of the sizes and strides of a fake tensor, with an example's number for each that is open."""
    if isinstance(value, Tensor):
        shape, strides = (tuple(map(_hint, sizes)) for sizes in (value.shape, value.stride()))
        zeros = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device).zero_()
        return zeros.requires_grad_(value.requires_grad)
    return _hint(value) if is_number(value) else value


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor in the order in which they lie in memory."""
    return tuple(_order(tensor.shape, tensor.stride()))


def _order(shape: Sequence[Any], strides: Sequence[Any]) -> list[int]:
    steps, sizes = [_hint(stride) for stride in strides], [_hint(size) for size in shape]
    return sorted(range(len(steps)), key=lambda axis: (-steps[axis] if sizes[axis] > 1 else 0, axis))


def _hint(size: Any) -> int:
    return int(size.node.hint if size.node.hint is not None else 2) if isinstance(size, SymInt) else int(size)
