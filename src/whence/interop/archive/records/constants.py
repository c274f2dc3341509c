"""Constants of Python's libraries as texts and numbers: dates, paths, fractions, what torch says of a dtype.

Each class is a row: what is written of a value, and how that is made a value again.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import torch

from whence.interop.archive.records.checked import listed, named_dtype, number, text
from whence.program.names import InWords


@dataclass(frozen=True)
class ConstantKind:
    """A class whose values are told as plain data."""

    kind: type
    tell: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _of_text(kind: Any) -> ConstantKind:
    return ConstantKind(kind, str, lambda data: kind(text(data)))


def _of_time(kind: Any) -> ConstantKind:
    return ConstantKind(kind, lambda value: value.isoformat(), lambda data: kind.fromisoformat(text(data)))


def _of_dtype(kind: Any) -> ConstantKind:
    return ConstantKind(kind, lambda value: _named(value.dtype), lambda data: kind(named_dtype(data)))


def _named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _fraction(data: Any) -> Fraction:
    above, below = listed(data)
    return Fraction(int(text(above)), int(text(below)))


def _pattern(data: Any) -> "re.Pattern[str]":
    pattern, flags = listed(data)
    return re.compile(text(pattern), number(flags))


_ROWS = (
    *map(_of_text, (Decimal, UUID, PurePosixPath, PureWindowsPath, type(Path()))),
    *map(_of_time, (date, datetime, time)),
    *map(_of_dtype, (torch.finfo, torch.iinfo)),
    ConstantKind(Fraction, lambda value: [str(value.numerator), str(value.denominator)], _fraction),
    ConstantKind(
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda data: timedelta(*map(number, listed(data))),
    ),
    ConstantKind(re.Pattern, lambda value: [value.pattern, value.flags], _pattern),
)
_NUMPY = "numpy."
_OF_NUMPY = frozenset(
    f"{kind}{bits}"
    for kind, widths in {"float": (16, 32, 64), "complex": (64, 128), "int": (8, 16, 32, 64)}.items()
    for bits in widths
) | {"uint8", "uint16", "uint32", "uint64"}
"""Numbers of NumPy's, which `numpy.sqrt` and its kin give: told by their bytes."""
_TOLD = {row.kind.__name__: row for row in _ROWS}
CONSTANTS = frozenset(row.kind for row in _ROWS)


def is_told(value: Any) -> bool:
    """Whether a file says all of a value: not of a time in some place, or of a pattern of bytes."""
    if is_of_numpy(value):
        return True
    if type(value) not in CONSTANTS:
        return False
    is_of_place = type(getattr(value, "tzinfo", None)) not in (type(None), timezone)
    return not is_of_place and type(getattr(value, "pattern", "")) is str


def is_of_numpy(value: Any) -> bool:
    """Whether a value is a number of NumPy's."""
    return type(value).__module__ == "numpy" and type(value).__name__ in _OF_NUMPY


def _number_of_numpy(name: str, told: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return InWords(f"{name} {told}")
    (found,) = numpy.frombuffer(bytes.fromhex(told), dtype=name)
    return found


def written_constant(value: Any) -> list[Any]:
    """The name of its class, and what is told of it."""
    name = type(value).__name__
    if is_of_numpy(value):
        return [f"{_NUMPY}{name}", value.tobytes().hex()]
    return [name, _TOLD[name].tell(value)]


def read_constant(data: Any) -> Any:
    """The value again; in words where its class is one of another system."""
    name, told = listed(data)
    if text(name).startswith(_NUMPY) and name.removeprefix(_NUMPY) in _OF_NUMPY:
        return _number_of_numpy(name.removeprefix(_NUMPY), text(told))
    row = _TOLD.get(text(name))
    return InWords(f"{name} {told}") if row is None else row.make(told)
