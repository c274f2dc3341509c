"""Which variables outside itself the code of a call reads: globals, and what a function closes over.

Nobody sees them being read, so every variable that code which ran could read is remembered with its value.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NotImplementedType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

from torch import Tensor, nn

from whence._torch.attribute_reads import is_observable
from whence.tracing.modules import CONTAINERS, Content, contents_of

_GONE: Any = object()
_NUMBERS_AND_TEXT = (bool, int, float, complex, str, bytes)
_CONSTANT = frozenset({"__class__"})
_DEPTH = 3
_STEADY = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, slice, frozenset, type(...), property),
        *(FunctionType, MethodType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType),
        *(MethodWrapperType, ModuleType, GenericAlias, UnionType, NotImplementedType, partial),
        *(classmethod, staticmethod, MappingProxyType, GetSetDescriptorType, MemberDescriptorType),
    }
)
_STEADY_PACKAGES = (
    "torch",
    "typing",
    "logging",
    "re",
    "functools",
    "operator",
    "abc",
    "collections",
    "inspect",
)


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable, and what it held when code that can read it began to run."""

    name: str
    read: Callable[[], Any]
    value: Any
    content: Sequence[Content]

    def is_unchanged(self) -> bool:
        """Whether it holds the same now."""
        now = self.read()
        if now is not self.value:
            kind = type(now)
            return kind is type(self.value) and kind in _NUMBERS_AND_TEXT and bool(now == self.value)
        return all(content.is_unchanged for content in self.content)


class Variables:
    """Collects the variables of the code that runs."""

    def __init__(self, is_user: Callable[[CodeType], bool]) -> None:
        self.found: dict[tuple[int, str], Variable] = {}
        self._is_user = is_user
        self._codes: dict[CodeType, bool] = {}
        self._met: list[Any] = []
        self._entered: dict[CodeType, list[Variable]] = {}
        self._changed: list[str] = []

    def met(self, frame: FrameType) -> None:
        """A function begins to run."""
        code = frame.f_code
        if code in self._codes:
            return
        self._codes[code] = not _is_written_by_python(code) and self._is_user(code)
        if self._codes[code]:
            self._note(frame.f_globals, frozenset(code.co_names), code.co_name, _DEPTH)
            held = frame.f_locals if code.co_freevars else {}
            self._entered[code] = [
                _variable(name, partial(held.get, name, _GONE), held.get(name, _GONE))
                for name in code.co_freevars
                if name not in _CONSTANT
            ]

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

    def add(self, variables: Iterable[Variable]) -> None:
        """Add what a call read that was not run."""
        self.found.update({(id(variable), variable.name): variable for variable in variables})

    def doubtful(self) -> Iterator[str]:
        """What is wrong with variables: they are changed, or hold things whose changes nobody sees."""
        yield from (f"it changes the variable {name}" for name in self._changed)
        for variable in self.found.values():
            if not is_steady(variable.value):
                kind = type(variable.value).__name__
                yield f"it may use {variable.name}, a {kind}, whose changes nobody sees"

    def close(self, things: Iterable[Any]) -> str | None:
        """Add what functions close over, looking for them in `things` too.

        Returns the name of a function that ran and cannot be found, if there is one.
        """
        codes = [code for code, is_user in self._codes.items() if is_user]
        within = {inner for code in codes for inner in _codes_in(code)}
        wanted = {code for code in codes if code not in within and self._entered[code]}
        functions: dict[CodeType, list[FunctionType]] = {}
        for function in _functions_in([*self._met, *things]):
            if function.__code__ in wanted:
                functions.setdefault(function.__code__, []).append(function)
        for code, found in functions.items():
            self._close_over(code, found)
        return next((code.co_qualname for code in codes if code in wanted - {*functions}), None)

    def _close_over(self, code: CodeType, functions: Sequence[FunctionType]) -> None:
        """Several functions may share their code; one of them was entered with what was noted then."""
        for entered in self._entered[code]:
            path, position = f"{code.co_qualname}.{entered.name}", code.co_freevars.index(entered.name)
            cells = [function.__closure__[position] for function in functions if function.__closure__]
            variables = [
                _variable(path, partial(content_of_cell, cell), content_of_cell(cell)) for cell in cells
            ]
            if not any(replace(entered, read=variable.read).is_unchanged() for variable in variables):
                self._changed.append(path)
            self.found.update(
                {
                    (id(cell), entered.name): variable
                    for cell, variable in zip(cells, variables, strict=True)
                    if (id(cell), entered.name) not in self.found
                }
            )


def _is_written_by_python(code: CodeType) -> bool:
    """Whether code is Python's own, or what `dataclass` makes, which reads nothing but types and defaults."""
    is_made = code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__")
    return is_made or code.co_filename.startswith("<frozen ")


def _variable(name: str, read: Callable[[], Any], value: Any) -> Variable:
    held = contents_of(name, value) if isinstance(value, CONTAINERS) else ()
    return Variable(name, read, value, held)


def content_of_cell(cell: CellType) -> Any:
    """What a closure's cell holds, if anything."""
    try:
        return cell.cell_contents
    except ValueError:  # a name that is bound later
        return _GONE


def _namespace(value: Any) -> Mapping[str, Any] | None:
    """The attributes of a Python module, class or object that is not torch's; modules are watched by
    others."""
    if isinstance(value, ModuleType):
        return (
            None if value.__name__.partition(".")[0] in ("torch", *sys.stdlib_module_names) else vars(value)
        )
    kind = value if isinstance(value, type) else type(value)
    if not is_observable(kind) or kind.__module__.partition(".")[0] in _STEADY_PACKAGES:
        return None
    return vars(value) if hasattr(value, "__dict__") else _slots(value)


def _slots(value: Any) -> Mapping[str, Any]:
    """The attributes of an object without a dictionary, looked up when they are asked for."""
    slots = {
        name: held
        for base in type(value).__mro__
        for name, held in vars(base).items()
        if isinstance(held, MemberDescriptorType)
    }
    return _Slots(value, slots)


class _Slots(Mapping[str, Any]):
    def __init__(self, thing: Any, slots: Mapping[str, MemberDescriptorType]) -> None:
        self._thing, self._slots = thing, slots

    def __getitem__(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self._thing)
        except AttributeError:  # nothing is in it yet
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


def is_steady(value: Any) -> bool:
    """Whether a thing cannot change, or whose changes are seen where they are looked for."""
    kind = type(value)
    if kind in _STEADY or isinstance(value, (*CONTAINERS, tuple, Tensor, nn.Module, type, Enum)):
        return True
    return is_observable(kind) or kind.__module__.partition(".")[0] in _STEADY_PACKAGES


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
            waiting += [content_of_cell(cell) for cell in thing.__closure__ or ()]
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


class Functions:
    """Tells those who want to know of every Python function that begins to run on this thread."""

    def __init__(self) -> None:
        self._told: list[Callable[[FrameType], None]] = []
        self._seen: set[CodeType] = set()

    @contextmanager
    def seen_by(self, met: Callable[[FrameType], None]) -> Iterator[None]:
        """Tell `met` of a call of every function that is called inside the block."""
        self._seen.clear()
        self._told.append(met)
        try:
            if len(self._told) > 1:
                yield
            else:
                with _tracing(self._begins):
                    yield
        finally:
            self._told.remove(met)

    def _begins(self, frame: FrameType, _event: str, _argument: object) -> None:
        if frame.f_code not in self._seen:
            self._seen.add(frame.f_code)
            for met in self._told:
                met(frame)


@contextmanager
def _tracing(begins: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    """Let the interpreter call `begins` for every frame.

    A tracer that returns nothing is told of nothing else; where somebody traces already (a debugger, a
    measurement of coverage), a profiler is, too.
    """
    if sys.gettrace() is not None:
        with _profiling(begins):
            yield
        return
    sys.settrace(begins)
    try:
        yield
    finally:
        sys.settrace(None)


@contextmanager
def _profiling(begins: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    before: Any = sys.getprofile()

    def notice(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            begins(frame, event, argument)

    sys.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(None)
        if hasattr(before, "enable"):  # the C profiler turns itself on
            before.enable()
        else:
            sys.setprofile(before)
