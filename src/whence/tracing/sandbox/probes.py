"""Numbers that tell when a decision is made by them: a counter that nobody asks decides nothing."""

from collections.abc import Callable
from typing import Any

_PAIRED = (
    *("add", "sub", "mul", "floordiv", "mod", "pow", "truediv"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_CARRYING = (*_PAIRED, *(f"r{name}" for name in _PAIRED), "neg", "pos", "abs", "invert")
"""Operations whose result follows from the number, and is asked in its place."""
_DECIDING = (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "int", "float", "index", "round"),
    *("divmod", "rdivmod"),
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
    for _names, _operation in ((_CARRYING, _carrying), (_DECIDING, _deciding)):
        for _name in (f"__{_word}__" for _word in _names if hasattr(_base, f"__{_word}__")):
            setattr(_kind, _name, _operation(getattr(_base, _name)))
