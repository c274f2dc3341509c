"""Which variables outside itself the code of a call reads: globals, and what a function closes over.

Nobody sees them being read, so every variable that code which ran could read is remembered with its value.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from whence._torch.attribute_reads import is_observable
from whence.tracing.modules import CONTAINERS, same_items

_GONE: Any = object()
_NUMBERS_AND_TEXT = (bool, int, float, complex, str, bytes)
_CONSTANT = frozenset({"__class__"})
_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable, and what it held when code that can read it began to run."""

    name: str
    read: Callable[[], Any]
    value: Any
    content: Any

    def is_unchanged(self) -> bool:
        """Whether it holds the same now."""
        now = self.read()
        if now is not self.value:
            kind = type(now)
            return kind is type(self.value) and kind in _NUMBERS_AND_TEXT and bool(now == self.value)
        return self.content is None or same_items(self.content, now)


class Variables:
    """Collects the variables of the code that runs."""

    def __init__(self, is_user: Callable[[CodeType], bool]) -> None:
        self.found: dict[tuple[int, str], Variable] = {}
        self._is_user = is_user
        self._codes: dict[CodeType, bool] = {}
        self._met: list[Any] = []

    def met(self, frame: FrameType) -> None:
        """A function begins to run."""
        code = frame.f_code
        if code in self._codes:
            return
        self._codes[code] = not _is_written_by_python(code) and self._is_user(code)
        if self._codes[code]:
            self._note(frame.f_globals, frozenset(code.co_names), code.co_name, _DEPTH)

    def _note(self, held: Mapping[str, Any], names: frozenset[str], path: str, depth: int) -> None:
        for name in names:
            key = (id(held), name)
            if name not in held or name.startswith("__") or key in self.found:
                continue
            value = held[name]
            self.found[key] = _variable(f"{path}.{name}", partial(held.get, name, _GONE), value)
            self._met.append(value)
            if not isinstance(value, FunctionType) and depth and (inside := _namespace(value)) is not None:
                self._note(inside, names, f"{path}.{name}", depth - 1)

    def close(self, things: Iterable[Any]) -> str | None:
        """Add what functions close over, looking for them in `things` too.

        Returns the name of a function that ran and cannot be found, if there is one.
        """
        codes = [code for code, is_user in self._codes.items() if is_user]
        within = {inner for code in codes for inner in _codes_in(code)}
        wanted = {code for code in codes if code not in within and {*code.co_freevars} - _CONSTANT}
        known = set[CodeType]()
        for function in _functions_in([*self._met, *things]):
            if function.__code__ in wanted:
                self._close_over(function)
                known.add(function.__code__)
        return next((code.co_qualname for code in codes if code in wanted - known), None)

    def _close_over(self, function: FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            read = partial(_content_of, cell)
            path = f"{function.__qualname__}.{name}"
            self.found.setdefault((id(cell), name), _variable(path, read, read()))


def _is_written_by_python(code: CodeType) -> bool:
    """Whether code is Python's own, or what `dataclass` makes, which reads nothing but types and defaults."""
    is_made = code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__")
    return is_made or code.co_filename.startswith("<frozen ")


def _variable(name: str, read: Callable[[], Any], value: Any) -> Variable:
    return Variable(name, read, value, copy(value) if isinstance(value, CONTAINERS) else None)


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is bound later
        return _GONE


def _namespace(value: Any) -> Mapping[str, Any] | None:
    """The attributes of a Python module, class or object that is not torch's; modules are watched by others."""
    if isinstance(value, ModuleType):
        return None if value.__name__.partition(".")[0] in ("torch", *sys.stdlib_module_names) else vars(value)
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        return None
    return vars(value) if is_observable(value if isinstance(value, type) else type(value)) else None


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


def _functions_in(things: Iterable[Any]) -> Iterator[FunctionType]:
    """Every function among things, classes and what functions close over."""
    waiting, seen = list(things), set[int]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, FunctionType):
            yield thing
            waiting += [_content_of(cell) for cell in thing.__closure__ or ()]
        elif isinstance(thing, type):
            waiting += [held for base in _written(thing) for held in _held(base)]
        elif isinstance(thing, MethodType | classmethod | staticmethod):
            waiting.append(thing.__func__)
        elif isinstance(thing, partial):
            waiting += (thing.func, *thing.args, *thing.keywords.values())
        elif isinstance(thing, property):
            waiting.append(thing.fget)
        elif isinstance(thing, list | tuple):
            waiting += thing
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif is_observable(type(thing)) and not isinstance(thing, nn.Module):
            waiting.append(type(thing))


def _written(kind: type) -> Iterator[type]:
    """A class and its bases, but for those of Python and torch."""
    return (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("builtins", "torch"))


def _held(kind: type) -> list[Any]:
    kinds = (FunctionType, classmethod, staticmethod, property, partial)
    return [value for value in vars(kind).values() if isinstance(value, kinds)]


@contextmanager
def seeing_functions(met: Callable[[FrameType], None]) -> Iterator[None]:
    """Tell of every Python function that begins to run on this thread."""
    before: Any = sys.getprofile()

    def notice(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            met(frame)

    sys.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(None)
        if hasattr(before, "enable"):  # the C profiler turns itself on
            before.enable()
        else:
            sys.setprofile(before)
