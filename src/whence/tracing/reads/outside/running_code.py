"""Which function a frame runs: Python says its code alone."""

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from whence._torch.files import is_library
from whence._torch.observe.attribute_reads import NOTHING, class_attribute
from whence.dependence.code import Code, codes_in, function_in, is_importing, kind_of
from whence.dependence.snapshots import content_of_cell

_TELLING = frozenset({logging.__file__, warnings.__file__})
_NEAR = 8
"""How many callers to look at for a message."""


class RunningFunction(NamedTuple):
    """A function that runs; of a method the class of what it was called of, and what holds it there, under
    which name."""

    function: FunctionType
    owner: type | None = None
    name: str = ""
    held: Any = None


class RunningFunctions:
    """Finds the functions of the user's that frames run; `is_user` knows their code."""

    def __init__(self, is_user: Callable[[CodeType], bool]) -> None:
        self._is_user = is_user
        self._reached: defaultdict[int, list[FunctionType]] = defaultdict(list)
        self._inner: dict[int, CodeType] = {}
        self._found: dict[tuple[int, ...], tuple[RunningFunction, Any]] = {}

    def reach(self, function: FunctionType) -> None:
        """Code names a function, which may run."""
        self._reached[id(function.__code__)].append(function)

    def is_reached(self, frame: FrameType) -> bool:
        """Whether a frame runs the code of a function that other code names."""
        return id(frame.f_code) in self._reached

    def is_passed_over(self, frame: FrameType) -> bool:
        """Whether a frame runs no code of the user's, or a function that one made which has run and which has
        its words: what that closes over is of the run.

        Python writes some for data classes and named tuples, and a file runs that is imported.
        """
        code, file = frame.f_code, str(frame.f_globals.get("__name__"))
        is_made = id(code) in self._inner or file.startswith("namedtuple_") or code.co_name == "<module>"
        return is_made or kind_of(code, self._is_user) is not Code.USER

    def running_in(self, frame: FrameType) -> RunningFunction:
        """The function that a frame runs: a method of what it was called with, one that code names and that
        closes over the same, or a variable of its file.

        For any other, one of the same code stands that closes over nothing.
        """
        code, first = frame.f_code, first_of(frame)
        kind = first if issubclass(type(first), type) else type(first)
        around = [frame.f_locals.get(name, NOTHING) for name in code.co_freevars]
        key = (id(code), id(kind), *map(id, around))
        if key not in self._found:
            self._inner.update({id(each): each for each in codes_in(code) if each is not code})
            self._found[key] = self._method(code, kind) or self._function(frame), (kind, around)
        return self._found[key][0]

    def _method(self, code: CodeType, kind: Any) -> RunningFunction | None:
        for owner in (kind, type(kind)):
            for base in owner.__mro__:
                for name, held in () if is_library(base.__module__) else vars(base).items():
                    function = function_in(held)
                    if function is not None and function.__code__ is code:
                        is_called = class_attribute(owner, name) is held  # and not by `super()` alone
                        return RunningFunction(function, owner if is_called else base, name, held)
        return None

    def _function(self, frame: FrameType) -> RunningFunction:
        code, variables = frame.f_code, frame.f_globals
        named = (*self._reached.get(id(code), ()), variables.get(code.co_name))
        functions = (each for each in named if type(each) is FunctionType and each.__code__ is code)
        found = next((each for each in functions if _closes_over(each, frame)), None)
        return RunningFunction(_like(code, variables) if found is None else found)


def is_on_the_side(frame: FrameType) -> bool:
    """Whether a function runs on behalf of an import, or for who reads messages."""
    if is_importing(frame):
        return True
    caller, steps = frame.f_back, 0
    while caller is not None and steps < _NEAR and caller.f_code.co_filename not in _TELLING:
        caller, steps = caller.f_back, steps + 1
    return caller is not None and steps < _NEAR


def first_of(frame: FrameType) -> Any:
    """What a frame's function was called with first: of a method, the object or the class."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0], NOTHING) if code.co_argcount else NOTHING


def _closes_over(function: FunctionType, frame: FrameType) -> bool:
    cells = zip(frame.f_code.co_freevars, function.__closure__ or (), strict=True)
    return all(content_of_cell(cell) is frame.f_locals.get(name, NOTHING) for name, cell in cells)


def _like(code: CodeType, variables: dict[str, Any]) -> FunctionType:
    return FunctionType(code, variables, closure=tuple(CellType() for _ in code.co_freevars))
