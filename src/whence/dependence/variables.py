"""Which variables outside itself the code of a call reads: globals, and what a function closes over.

Nobody sees them being read, so every variable that code which ran could read is remembered, with its value
and with everything that can be reached from it.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import is_
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn

from whence._torch.observe.attribute_reads import NOTHING, is_observable
from whence.dependence.code import (
    Code,
    asks_environment_alone,
    behind,
    builtin_queries,
    codes_in,
    function_in,
    globals_in,
    imported,
    is_forbidden,
    is_importing,
    kind_of,
    names_in,
)
from whence.dependence.object_graph import Reached
from whence.dependence.snapshots import content_of_cell
from whence.provenance import Source

_CONSTANT = frozenset({"__class__"})
_DEPTH = 3
_CALLED = (FunctionType, classmethod, staticmethod, property, partial)


@dataclass
class Namespace:
    """The names that were looked up in one mapping, with what they held and how to call them."""

    mapping: Mapping[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)

    def changed(self) -> str | None:
        """The first variable that holds something else now."""
        if all(map(is_, self._now(), self.values)):
            return None
        rows = zip(self.names.values(), self._now(), self.values, strict=False)
        return next(spelled for spelled, found, held in rows if found is not held)

    def _now(self) -> Iterator[Any]:
        return map(self.mapping.get, self.names, repeat(NOTHING))


class Variables:
    """Collects the variables of the code that runs, and all that can be reached from them.

    Code is told apart by identity: equal code in two files reads the variables of each.

    `is_user` tells the user's code from torch's and Python's, `is_watched` things whose attributes are seen
    being read.
    """

    def __init__(self, is_user: Callable[[CodeType], bool], is_watched: Callable[[Any], bool]) -> None:
        self.reached = Reached(is_watched)
        self._spaces: dict[int, Namespace] = {}
        self._is_user = is_user
        self._codes: dict[int, CodeType] = {}
        self._met: list[Any] = []
        self._entered: dict[int, dict[str, Any]] = {}
        self._doubts: list[str] = []

    def met(self, frame: FrameType) -> bool:
        """A function begins to run; says whether it is enough to have seen it once."""
        code = frame.f_code
        if id(code) in self._codes:
            return True
        kind = Code.ENGINE if is_importing(frame) else kind_of(code, self._is_user)
        if kind is Code.LIBRARY and (why := is_forbidden(code, frame.f_globals.get("__name__", ""))):
            if self._caller(frame) is Code.ENGINE:
                return False
            self._doubts.append(f"it runs {why}")
        self._codes[id(code)] = code
        if kind in (Code.USER, Code.NETWORK):
            self._read_by(frame, code, kind)
        return True

    def _caller(self, frame: FrameType | None) -> Code:
        """Whose code runs a function of Python's."""
        while frame is not None:
            kind = kind_of(frame.f_code, self._is_user)
            if kind is not Code.LIBRARY:
                return kind
            frame = frame.f_back
        return Code.ENGINE

    def _read_by(self, frame: FrameType, code: CodeType, kind: Code) -> None:
        names = names_in(code)
        self._note(frame.f_globals, globals_in(code), code.co_name, _DEPTH, names)
        for module in imported(code, frame.f_globals):
            self._look_into(module, names, code.co_name, _DEPTH)
        if kind is Code.USER:
            self._doubts += builtin_queries(code, frame.f_globals, frame.f_builtins)
        held = frame.f_locals if code.co_freevars else {}
        self._entered[id(code)] = {
            name: held.get(name, NOTHING) for name in code.co_freevars if name not in _CONSTANT
        }
        for name, value in self._entered[id(code)].items():
            self._look_into(value, names, f"{code.co_name}.{name}", _DEPTH)

    def _note(
        self, held: Mapping[str, Any], names: frozenset[str], path: str, depth: int, inside: frozenset[str]
    ) -> None:
        """Note what a mapping holds under `names`, and what Python modules among that hold under `inside`."""
        space = self._spaces.setdefault(id(held), Namespace(held))
        for name in names:
            if name not in held or name.startswith("__") or name in space.names:
                continue
            value = held[name]
            space.names[name] = f"{path}.{name}"
            space.values.append(value)
            self._look_into(value, inside, f"{path}.{name}", depth)

    def _look_into(self, value: Any, names: frozenset[str], path: str, depth: int) -> None:
        self._met.append(value)
        if not isinstance(value, ModuleType):
            self.reached.add(value, path)
        elif asks_environment_alone(value, names):
            self.reached.add(os.environ, path)
        elif why := is_forbidden(None, value.__name__):
            self._doubts.append(f"it may use {why}")
        elif depth and value.__name__.partition(".")[0] not in sys.stdlib_module_names:
            self._note(vars(value), names, path, depth - 1, names)

    def ran(self, source: Source) -> bool:
        """Whether the function that a line is in has run."""
        return any(
            (code.co_filename, code.co_qualname) == (source.file, source.function)
            for code in self._codes.values()
        )

    def include(self, other: "OutsideVariables") -> None:
        """Add what a call read that was not run."""
        for space in other.spaces:
            mine = self._spaces.setdefault(id(space.mapping), Namespace(space.mapping))
            for (name, spelled), value in zip(space.names.items(), space.values, strict=True):
                if name not in mine.names:
                    mine.names[name] = spelled
                    mine.values.append(value)
        self.reached.include(other.reached)

    def doubtful(self, things: Iterable[Any]) -> Iterator[str]:
        """What is wrong with variables: they are changed, or hold things whose changes nobody sees.

        Functions are looked for in `things`, too.
        """
        yield from self._doubts
        if self.reached.doubt:
            yield self.reached.doubt
        if lost := self._close(things):
            yield f"nobody can say which variables {lost} reads"
        yield from (f"it changes {path}" for path in self.outside().changed())

    def outside(self) -> "OutsideVariables":
        """All of it, as it is now known."""
        return OutsideVariables(tuple(self._spaces.values()), self.reached)

    def _close(self, things: Iterable[Any]) -> str | None:
        """Add the cells that functions close over.

        Returns the name of a function that ran and cannot be found, if there is one, or whose variables have
        changed.
        """
        within = {id(inner) for code in self._codes.values() for inner in codes_in(code) if inner is not code}
        wanted = {key for key, names in self._entered.items() if names and key not in within}
        found: set[int] = set()
        for function in _functions_in([*self._met, *things]):
            code = function.__code__
            if id(code) in wanted and self._is_as_entered(function):
                found.add(id(code))
                for cell in function.__closure__ or ():
                    self.reached.add(cell, code.co_qualname)
        return next((self._codes[key].co_qualname for key in wanted if key not in found), None)

    def _is_as_entered(self, function: FunctionType) -> bool:
        """Several functions may share their code; one of them was entered with what was noted then."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        entered = self._entered[id(function.__code__)]
        return all(content_of_cell(cells[name]) is value for name, value in entered.items())


@dataclass(frozen=True)
class OutsideVariables:
    """The variables that a call could read, and all that could be reached from them."""

    spaces: tuple[Namespace, ...]
    reached: Reached

    def changed(self) -> Iterator[str]:
        """What holds something else now."""
        yield from (f"the variable {name}" for space in self.spaces if (name := space.changed()) is not None)
        for held in self.reached.changed():
            yield _thing_in_words(held.thing)


def _thing_in_words(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return f"a {type(thing).__name__} outside the model"


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
            waiting += [content_of_cell(cell) for cell in thing.__closure__ or ()]
        elif isinstance(thing, type):
            held = [value for base in _classes_of_user(thing) for value in vars(base).values()]
            waiting += [function_in(value) or value for value in held if isinstance(value, _CALLED)]
        elif inside := behind(thing):
            waiting += inside
        elif isinstance(thing, list | tuple):
            waiting += thing
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif is_observable(type(thing)) and not isinstance(thing, nn.Module):
            waiting.append(type(thing))


def _classes_of_user(kind: type) -> Iterator[type]:
    """A class and its bases, but for those of Python and torch."""
    return (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("builtins", "torch"))
