"""Which Python values equality decides, and what arrays hold."""

import array
import cmath
import enum
import numbers
import re
import types
from typing import Any

import torch

from whence._torch.plain_values import PLAIN_IN_WHOLE, TEXTS_AND_NUMBERS
from whence._torch.subclasses.spread import content_of_spread

_CONSTANT = PLAIN_IN_WHOLE | {re.Pattern, torch.finfo, torch.iinfo}
_LIBRARIES = frozenset({"decimal", "fractions", "datetime", "uuid", "pathlib", "ipaddress", "zoneinfo"})
_BY_NAME = (enum.Enum, types.ModuleType, type)
_LARGEST = 1_000_000
"""Bytes of an array that a guard keeps; of a larger one it keeps which it was."""


def is_constant(value: object) -> bool:
    """Whether equality of type and value decides: Python's numbers and texts, dates and paths, torch's
    descriptions.

    Classes derived from numbers and texts may compare as they like, and are compared as what they are derived
    from.
    """
    kind = type(value)
    if kind in _CONSTANT or isinstance(value, (*_BY_NAME, *TEXTS_AND_NUMBERS)):
        return True
    room = kind.__module__.partition(".")[0]
    return room in _LIBRARIES or (room == "numpy" and isinstance(value, numbers.Number))


def is_solid(value: object) -> bool:
    """Whether a value is a constant, or a tuple of such, which a set may hold."""
    return all(map(is_solid, value)) if type(value) is tuple else is_constant(value)


def is_literal(value: object) -> bool:
    """Whether Python can write a value and read it again: numbers, texts, flags, None, and tuples of such."""
    if type(value) is tuple:
        return all(map(is_literal, value))
    if isinstance(value, (float, complex)) and not cmath.isfinite(value):
        return False
    return value is None or type(value) in TEXTS_AND_NUMBERS


def content_of(value: Any) -> object | None:
    """What an array holds, or a mesh is, as one comparable value; None for what is neither, or too large."""
    if isinstance(value, bytearray):
        return bytes(value) if len(value) <= _LARGEST else None
    if isinstance(value, array.array):
        return (value.typecode, value.tobytes()) if len(value) * value.itemsize <= _LARGEST else None
    if type(value).__module__ == "numpy" and hasattr(value, "nbytes") and hasattr(value, "dtype"):
        plain = not value.dtype.hasobject and value.nbytes <= _LARGEST
        return (value.dtype.str, value.shape, value.tobytes()) if plain else None
    return content_of_spread(value)
