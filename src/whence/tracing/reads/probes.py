"""Numbers that tell when a decision is made by them: a counter that nobody asks decides nothing."""

from collections.abc import Callable
from typing import Any

_CARRYING = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__rfloordiv__"),
    *(
        "__mod__",
        "__rmod__",
        "__pow__",
        "__rpow__",
        "__truediv__",
        "__rtruediv__",
        "__neg__",
        "__pos__",
        "__abs__",
    ),
    *(
        "__and__",
        "__rand__",
        "__or__",
        "__ror__",
        "__xor__",
        "__rxor__",
        "__lshift__",
        "__rshift__",
        "__invert__",
    ),
)
"""Operations whose result follows from the number, and is asked in its place."""
_DECIDING = (
    *(
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__bool__",
        "__hash__",
        "__int__",
        "__float__",
    ),
    *("__index__", "__round__", "__divmod__", "__rdivmod__"),
)


class _Probing:
    told: Callable[[], None]


class ProbingInt(int, _Probing):
    """A whole number that tells when it is asked."""


class ProbingFloat(float, _Probing):
    """A number that tells when it is asked."""


def probing(value: Any, told: Callable[[], None]) -> Any:
    """A number that calls `told` when it, or what is computed from it, decides something."""
    if type(value) in (int, ProbingInt):
        number: Any = ProbingInt(value)
    elif type(value) in (float, ProbingFloat):
        number = ProbingFloat(value)
    else:
        return value
    number.told = told
    return number


def plain(value: Any) -> Any:
    """The number as Python's own."""
    if isinstance(value, ProbingInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, ProbingFloat) else value


def _carrying(computed: Callable[..., Any]) -> Callable[..., Any]:
    def operation(number: Any, *others: Any) -> Any:
        return probing(computed(number, *others), number.told)

    return operation


def _deciding(computed: Callable[..., Any]) -> Callable[..., Any]:
    def operation(number: Any, *others: Any) -> Any:
        number.told()
        return computed(number, *others)

    return operation


for _kind, _base in ((ProbingInt, int), (ProbingFloat, float)):
    for _name in _CARRYING:
        if hasattr(_base, _name):
            setattr(_kind, _name, _carrying(getattr(_base, _name)))
    for _name in _DECIDING:
        if hasattr(_base, _name):
            setattr(_kind, _name, _deciding(getattr(_base, _name)))
