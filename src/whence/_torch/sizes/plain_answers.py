"""What code of the user's may do with a size as with any number of Python's, and PyTorch's symbols cannot."""

import ast
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import islice
from types import FrameType, MappingProxyType
from typing import Any

from torch import SymBool, SymFloat, SymInt

from whence._torch.patching import patched

_THEIRS = frozenset({"torch", "sympy", "whence"})
"""Packages that know what a symbol is."""
_TELLING = frozenset(
    (
        *("print", "write", "debug", "info", "warning", "warn", "error", "exception", "critical", "log"),
        *("warning_once", "warn_once", "info_once"),
    )
)
"""Functions that write for people."""
_PYTHON_S: Mapping[type, type] = MappingProxyType({SymInt: int, SymFloat: float, SymBool: bool})


def _as_number(kind: type, name: str) -> Callable[..., Any]:
    """A method for which a symbol is its number, and its size fixed; not where packages know better."""
    for_others = getattr(kind, name)

    def answered(self: Any, *given: Any) -> Any:
        found = getattr(self.node, "expr", None)
        if found is None or (_package(sys._getframe(1)) in _THEIRS and not found.is_number):
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
    return format(int(self), form) if form or _decides(sys._getframe(1)) else str(self)


def _written(kind: type, name: str) -> Callable[..., str]:
    """How a symbol is written: as the number that it is, where code may decide by that."""
    as_symbol = getattr(kind, name)

    def written(self: Any) -> str:
        if getattr(self.node, "expr", None) is None or not _decides(sys._getframe(1)):
            return as_symbol(self)  # type: ignore[no-any-return]
        return str(_PYTHON_S[kind](self))

    return written


def _decides(frame: FrameType) -> bool:
    """Whether code that writes a symbol may decide by what it has written: not where it only tells people."""
    code = frame.f_code
    if _package(frame) in _THEIRS:
        return False
    line, end, column, end_column = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    if line is None or end is None or column is None or end_column is None:
        return True
    told = _told(code.co_filename)
    return not any(first <= (line, column) and (end, end_column) <= last for first, last in told)


@cache
def _told(file: str) -> Sequence[tuple[tuple[int, int], tuple[int, int]]]:
    """Where code of a file tells people something: errors, and calls that only write or log."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()
    spans: list[ast.stmt] = [node for node in nodes if isinstance(node, ast.Raise | ast.Assert)]
    spans += [node for node in nodes if isinstance(node, ast.Expr) and _tells(node.value)]
    return [
        ((each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0)) for each in spans
    ]


def _tells(called: ast.expr) -> bool:
    function = called.func if isinstance(called, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in _TELLING


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def as_key(key: Any) -> Any:
    """The key of a dictionary with numbers in the place of symbols, which are known where they are one."""
    if type(key) is tuple:
        return tuple(map(as_key, key))
    return _PYTHON_S[type(key)](key) if type(key) in _PYTHON_S else key


@contextmanager
def symbols_taken_for_numbers() -> Iterator[None]:
    """Inside the block symbols can be keys, be written and copied, divided with a rest and inverted."""
    with ExitStack() as active:
        for kind in _PYTHON_S:
            active.enter_context(patched(kind, "__deepcopy__", lambda self, _: self))
            active.enter_context(patched(kind, "__hash__", _as_number(kind, "__hash__")))
            for name in ("__str__", "__repr__"):
                active.enter_context(patched(kind, name, _written(kind, name)))
        active.enter_context(patched(SymInt, "__divmod__", _divided))
        active.enter_context(patched(SymInt, "__rdivmod__", _divides))
        active.enter_context(patched(SymInt, "__invert__", _inverted))
        active.enter_context(patched(SymInt, "__format__", _formatted))
        yield
