"""What code of the user's may do with a size as with any number of Python's, and PyTorch's symbols cannot."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

from torch import SymBool, SymFloat, SymInt

from whence._torch.patching import patched

_THEIRS = frozenset({"torch", "sympy", "whence"})
"""Packages that know what a symbol is."""
_PYTHON_S: Mapping[type, type] = MappingProxyType({SymInt: int, SymFloat: float, SymBool: bool})


def _as_number(kind: type, name: str) -> Callable[..., Any]:
    """A method for which a symbol is its number, and its size fixed; not where packages know better."""
    for_others = getattr(kind, name)

    def answered(self: Any, *given: Any) -> Any:
        package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        found = getattr(self.node, "expr", None)
        if found is None or (package in _THEIRS and not found.is_number):
            return for_others(self, *given)
        return getattr(_PYTHON_S[kind](self), name)(*given)

    return answered


def _divided(self: Any, other: Any) -> tuple[Any, Any]:
    return self // other, self % other


def _divides(self: Any, other: Any) -> tuple[Any, Any]:
    return other // self, other % self


def _inverted(self: Any) -> Any:
    return -self - 1


def _formatted(self: Any, form: str) -> str:
    return format(int(self), form) if form else str(self)


def as_key(key: Any) -> Any:
    """The key of a dictionary with numbers in the place of symbols, which are known where they are one."""
    if type(key) is tuple:
        return tuple(map(as_key, key))
    return _PYTHON_S[type(key)](key) if type(key) in _PYTHON_S else key


@contextmanager
def symbols_taken_for_numbers() -> Iterator[None]:
    """Inside the block symbols can be keys, be written in a format, divided with a rest and inverted."""
    with ExitStack() as active:
        for kind in _PYTHON_S:
            active.enter_context(patched(kind, "__hash__", _as_number(kind, "__hash__")))
        active.enter_context(patched(SymInt, "__divmod__", _divided))
        active.enter_context(patched(SymInt, "__rdivmod__", _divides))
        active.enter_context(patched(SymInt, "__invert__", _inverted))
        active.enter_context(patched(SymInt, "__format__", _formatted))
        yield
