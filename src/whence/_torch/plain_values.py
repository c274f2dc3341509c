"""Which Python values are plain: their type and equality say all about them, and they never change.

How values that equality decides are compared stands here, too.
"""

import enum
import types
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import SymFloat, Tensor

PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type(...)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
"""Types of values that hold no others."""
PLAIN_IN_WHOLE = frozenset({*PLAIN, range, slice, torch.Size})
"""The same with types of values that hold such, and, while sizes are open, symbols."""
TEXTS_AND_NUMBERS = (bool, str, bytes, int, float, complex)
"""Types whose own equality decides, also for classes derived from them."""
_THEMSELVES = (Tensor, SymFloat, enum.Enum, types.ModuleType, type)
"""What is equal to itself alone; a number of a run is not to be asked."""


def same_objects(left: Sequence[object], right: Sequence[object]) -> bool:
    """Whether these are the same objects, one by one."""
    return len(left) == len(right) and all(map(is_, left, right))


def same_constant(expected: Any, value: Any) -> bool:
    """Equality of type and value; nan is itself, and the two zeros differ. Tracers read this."""
    if expected is value:
        return True
    if type(expected) is not type(value) or isinstance(value, _THEMSELVES):
        return False
    if isinstance(expected, (float, complex)):
        return repr(expected) == repr(value)
    base: Any = next((base for base in TEXTS_AND_NUMBERS if isinstance(expected, base)), None)
    if base is None or type(expected).__eq__ is base.__eq__:
        return bool(expected == value)
    return bool(base.__eq__(expected, value))
