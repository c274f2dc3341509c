"""What the code of a model can reach outside of it, kept as it was before that code runs.

Nobody sees variables being read or written. So when a method of the model is looked up, everything that its
code names is looked at: variables, what they lead to, and the functions that it may call, with what these
name.
"""

import builtins
import datetime
import os
from collections.abc import Callable, Iterable, Sequence, Set
from contextvars import ContextVar
from dis import findlinestarts, get_instructions
from enum import Enum
from functools import _lru_cache_wrapper, partial
from itertools import islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from whence._torch.fakes import FakeTensor
from whence._torch.files import is_installed, is_library
from whence._torch.observe.attribute_reads import class_attribute, is_observable
from whence._torch.plain_values import PLAIN_IN_WHOLE
from whence.dependence.code import (
    APART,
    IDENTITY,
    OF_ENVIRONMENT,
    behind,
    codes_in,
    compares_identity,
    defaults_of,
    function_in,
    globals_within,
    imported,
    names_in,
    tells_apart,
    texts_in,
)
from whence.dependence.lookup import static_attribute
from whence.dependence.snapshots import (
    ARRAY,
    ATTRIBUTES,
    CACHED,
    CLASS,
    CONTAINERS,
    CONTEXT,
    LOCAL,
    NamespaceEntry,
    Saved,
    StateKind,
    containers_saved,
    content_of_slots,
    is_iterator,
    results_kept,
    save,
)
from whence.errors import SideEffect
from whence.program.arguments.optimizer_arguments import Outside
from whence.provenance import ModulePath, Source
from whence.tracing.reads.code_words import ENTERED, HOLDING, CodeWords, names_if_it_looks_up, words_held
from whence.tracing.reads.held_values import as_found, of_class, of_context, spelled_in
from whence.tracing.reads.named_values import beginning, is_plain
from whence.tracing.reads.nondeterminism import ImpureCalls, other_each_time
from whence.tracing.reads.outside.running_code import (
    RunningFunction,
    RunningFunctions,
    first_of,
    is_on_the_side,
)
from whence.tracing.reads.outside.watched_values import WatchedValues
from whence.tracing.reads.own_functions import CalledByName
from whence.tracing.reads.refused_code import iterated, refuse_compared, refuse_matched

_ATOMS = (*PLAIN_IN_WHOLE, Tensor, ref, CodeType, torch.Generator)
_OF_PYTHON = frozenset(
    (
        *("builtins", "collections", "random", "_random", "_thread", "weakref", "_weakrefset", "types"),
        *("array", "numpy"),
    )
)
"""Packages of Python's, and others that are no user's, whose objects keep state that a model advances."""
_OWNING = (*HOLDING, Enum)
"""What the model holds and nobody sees being read, though it may have attributes."""
_IN_WHOLE = frozenset({"vars", "__dict__"})
"""Names with which code gets all attributes of a thing at once, to look one up by text."""
_DEEP, _MOST, _MANY = 6, 4000, 256
"""How far things are followed, how many are looked at, and how many in one that nobody can change."""
_OF_TENSORS = ("_parameters", "_buffers")
"""Tables of a module, whose entries are attributes of it."""
_NOW = frozenset({"now", "utcnow", "today"})
"""Methods of Python's dates, in whose place nothing can be put: they are read off the code."""
_DATES = (datetime, datetime.datetime, datetime.date)

Reader = tuple[CodeType, str]


class Reachable:
    """Keeps the state of everything that code can reach; `is_inside` says what is looked at elsewhere."""

    has_symbols = False  # which stand for numbers
    step_follows: Callable[[RunningFunction, FrameType], bool] | None = None
    """Who looks, in a step, at what functions read that no method of the model leads to; see `began`."""

    def __init__(
        self,
        is_user: Callable[[CodeType], bool],
        is_inside: Callable[[object], bool],
        sources: ImpureCalls,
        observe: Callable[[object], bool],
    ) -> None:
        self.saved: list[Saved] = []
        self.readers: dict[int, Reader] = {}
        self.sources = sources
        self.names, self.texts = set[str](), set[str]()
        self.called = CalledByName(is_user)
        self._named = WatchedValues(is_user, is_inside, observe)
        self.read = self._named.read
        self._owned: list[tuple[Saved, Source]] = []
        self._contexts: list[tuple[Saved, Source]] = []
        self._is_user, self._is_inside = is_user, is_inside
        self._seen: dict[object, object] = {}
        self._looking_up: dict[int, frozenset[str]] = {}
        self._running = RunningFunctions(is_user)

    # --- code ----------------------------------------------------------------------------------------

    def code_of(self, value: object) -> None:
        """Look at what a function or a method may use, before it is called."""
        function = value.__func__ if type(value) is MethodType else value
        while isinstance(function, partial):
            function = function.func
        if type(function) is not FunctionType:
            return
        self.called.function(function.__code__)
        held = self._held_words(function, value)
        self._function(function, function.__name__, _DEEP, held)
        self._runs(function, function.__name__, held)
        owner = type(value.__self__) if type(value) is MethodType else None
        if owner is not None and self._is_new(("called", owner, function), function):
            self._class(owner, function.__code__, names_in(function.__code__), _DEEP)
            self._walk(owner.__name__, owner, function.__code__)

    def began(self, frame: FrameType) -> bool:
        """A function begins to run; says whether it is enough to have seen it once."""
        if self._running.is_passed_over(frame):
            return self.called.began(frame)
        if is_on_the_side(frame):
            return False
        running = function, owner, name, attribute = self._running.running_in(frame)
        first, code, given = first_of(frame), function.__code__, self._named.given(frame)
        for module in (value for value in given if isinstance(value, ModuleType)):
            self._module(module, (code, module.__name__), frozenset(names_in(code)), _DEEP)
        is_own = not is_installed(code.co_filename)
        if is_own and (follow := self.step_follows) is not None and not self._running.is_reached(frame):
            return follow(running, frame)
        held = self._held_words(function, None if owner is None else MethodType(function, first))
        if is_own:
            self._function(function, code.co_name, _DEEP, held)
        self._runs(function, code.co_name, held)
        if owner is not None and self._is_new(("began", owner, code), code):
            self._method_runs(owner, name, attribute, code, self._is_inside(first))
        return not given and owner is None and not code.co_freevars and not self._looking_up[id(code)]

    def _method_runs(self, owner: type, name: str, held: object, code: CodeType, is_watched: bool) -> None:
        """Compare a method that runs, and what it reads of its class, where nobody sees these being read."""
        if not is_watched or name.startswith("__"):
            self._named.walk(of_class(owner, name, held), beginning(code), CodeWords.of(code))
        if not is_watched:
            self._walk(owner.__name__, owner, code)

    def _runs(self, function: FunctionType, path: str, held: frozenset[Any]) -> None:
        """Compare what a function reads that runs: its variables, its defaults, what it imports."""
        code, cells = function.__code__, function.__closure__ or ()
        if self._is_user(code) and self._is_new(("runs", id(code), *map(id, cells), held), function):
            for module in imported(code, function.__globals__):
                reader, names = (code, module.__name__), frozenset(names_in(code))
                self._follow(module, module.__name__, reader, names, _DEEP)
            if not names_in(code).isdisjoint(OF_ENVIRONMENT):
                self._named.environment(code)
            self._named.function(function, path, CodeWords.of(code).and_held(held))

    def loss(self, loss: Any) -> None:
        """Look at a loss function, and at the object or the arguments that it comes with."""
        self.code_of(loss)
        owner, function = loss, getattr(type(loss), "forward", type(loss).__call__)
        if type(loss) is MethodType:
            owner, function = loss.__self__, loss.__func__
        elif isinstance(loss, partial):
            function = loss.func
        if type(loss) is FunctionType:
            self._walk("the loss", loss, loss.__code__)
        if type(function) is not FunctionType:
            return
        if owner is loss and not isinstance(loss, partial):
            self.code_of(MethodType(function, loss))
        reader, names = (function.__code__, "the loss"), names_in(function.__code__)
        for value in (*loss.args, *loss.keywords.values()) if isinstance(loss, partial) else ():
            self._follow(value, "an argument of the loss", reader, names, _DEEP)
            self._walk("an argument of the loss", value, function.__code__)
        self._walk("the loss", owner, function.__code__)

    def _held_words(self, function: FunctionType, method: object) -> frozenset[Any]:
        """Texts and numbers by which a function may look something up, of those that it names: what its
        variables hold, and the object whose method it is."""
        code = function.__code__
        if (names := self._looking_up.get(id(code))) is None:
            names = self._looking_up[id(code)] = names_if_it_looks_up(function)
        return words_held(function, names, method) if names else frozenset()

    def _function(
        self, function: FunctionType, path: str, depth: int, held: frozenset[Any] | None = None
    ) -> None:
        code, cells = function.__code__, function.__closure__ or ()
        held = self._held_words(function, None) if held is None else held
        if not self._is_user(code) or not self._is_new((id(code), *map(id, cells), held), (function, cells)):
            return
        self._running.reach(function)
        names, inner = frozenset[str](), list(codes_in(code))
        for each in inner:
            names |= names_in(each)
        self._note_words(names, inner)
        refuse_compared(function, inner)
        refuse_matched(code, inner if self.has_symbols else ())
        self.sources.spelled(names)
        for row in self._save(path, function, (code, path)):
            self._inside(row, (code, path), names, depth - 1)
        for name in sorted(globals_within(code)):
            self._variable(function.__globals__, name, (code, name), names, depth - 1)
        for name, cell in zip(code.co_freevars, cells, strict=True):
            if name != "__class__" and self._is_new(id(cell), cell) and not self.sources.closed_over(cell):
                for row in self._save(name, cell, (code, name)):
                    self._follow(row.before, name, (code, name), names, depth - 1)
        self.sources.checked(function)
        for value in defaults_of(function):
            self._follow(value, f"a default argument of {path}", (code, path), names, depth - 1)

    def _note_words(self, names: Set[str], inner: Sequence[CodeType]) -> None:
        """Note the names that code spells, and what it does for which no name stands."""
        self.names |= names
        if not names.isdisjoint(_IN_WHOLE):
            self.texts.update(text for each in inner for text in texts_in(each) if text.isidentifier())
        asks = {IDENTITY: compares_identity, APART: tells_apart}
        self.names.update(word for word, is_so in asks.items() if any(map(is_so, inner)))

    def _walk(self, path: str, value: object, code: CodeType) -> None:
        self._named.walk(Outside(path, value, (), value), beginning(code), CodeWords.of(code))

    def _variable(
        self, namespace: dict[str, Any], name: str, reader: Reader, names: frozenset[str], depth: int
    ) -> None:
        if is_python_s := name not in namespace and hasattr(builtins, name):
            self.called.in_file(namespace, name)
        if self.sources.answers_for(namespace, name) or is_python_s:
            return
        if not self._is_new((id(namespace), name), namespace):
            return
        value = namespace.get(name)
        is_watched = self.sources.named(namespace, name)
        if (asked := _NOW.intersection(names)) and any(value is each for each in _DATES):
            raise SideEffect.of([other_each_time(f"datetime.{min(asked)}", line_of((reader[0], min(asked))))])
        plain = not is_watched and not isinstance(value, ModuleType | BuiltinFunctionType)
        if plain and not (isinstance(value, type | FunctionType) and is_library(value.__module__)):
            self._save(name, NamespaceEntry(namespace, name), reader)
        is_called = isinstance(value, FunctionType)  # functions that call each other are followed to the end
        self._follow(value, name, reader, names, depth + is_called)

    def gradient_asked(self, path: str, parameter: Tensor, source: Source | None) -> None:
        """Note whether a parameter holds a gradient."""
        self._named.add(as_found(f"{path}.grad is None", parameter, _has_no_gradient), source)

    # --- things --------------------------------------------------------------------------------------

    def held_under(self, owner: type, value: object, path: str) -> None:
        """Name what an attribute of an instance leads to."""
        if self._is_new(("under", owner, id(value)), value) and not self._is_inside(value):
            self._named.held(owner, value, path)
            forward = function_in(class_attribute(owner, "forward"))
            if isinstance(value, ModuleType) and forward is not None:
                self._module(value, (forward.__code__, path), frozenset(names_in(forward.__code__)), _DEEP)

    def held(
        self,
        value: object,
        path: ModulePath,
        place: Callable[[], tuple[object, Source | None]],
        but: StateKind | None = None,
    ) -> None:
        """Look at a thing that the model holds; `but` is what is looked at elsewhere."""
        if is_iterator(value):
            _, line = place()
            raise iterated(str(path), value, None if line is None else str(line))
        if self._is_new(id(value), value):
            rows = [row for row in save(str(path), value) if row.kind is not but]
            slots = [(f"{path}.{name}", held) for name, held in content_of_slots(value).items()]
            rows += containers_saved([row for row in slots if isinstance(row[1], CONTAINERS)], keyed=True)
            self.saved += rows
            for row in (row for row in rows if row.kind in (CONTEXT, ATTRIBUTES, LOCAL, CLASS)):
                _, source = place()
                if source is not None and row.kind is CONTEXT:
                    self._contexts.append((row, source))
                elif source is not None and (row.kind is not ATTRIBUTES or issubclass(type(value), _OWNING)):
                    self._owned.append((row, source))

    def class_held(
        self, kind: type, path: ModulePath, place: Callable[[], tuple[object, Source | None]]
    ) -> None:
        """Look at a class of the user's that the model holds, at those that it comes of, and at those in it:
        code may take one for a table of settings."""
        for base in kind.__mro__ if is_observable(kind) and not issubclass(kind, Enum) else ():
            if is_library(base.__module__) or id(base) in self._seen:
                continue
            self.held(base, path, place)
            for name, inside in vars(base).items():
                if isinstance(inside, type):
                    self.class_held(inside, path.child(name), place)

    def _follow(self, value: Any, path: str, reader: Reader, names: Iterable[str], depth: int) -> None:
        kind = type(value)
        if depth < 1 or issubclass(kind, _ATOMS) or len(self.saved) > _MOST or self._is_inside(value):
            return
        if issubclass(kind, FunctionType):
            self._function(value, path, depth)
            for inside in () if self._is_user(value.__code__) else _functions_inside(value):
                self._follow(inside, path, reader, names, depth)
        elif issubclass(kind, ModuleType):
            self._module(value, reader, frozenset(names), depth - 1)
        elif issubclass(kind, type):
            self._class(value, reader[0], names, depth)
        elif is_iterator(value):
            raise iterated(path, value, line_of(reader))
        else:
            self._look_inside(value, path, reader, names, depth)

    def _look_inside(self, value: Any, path: str, reader: Reader, names: Iterable[str], depth: int) -> None:
        kind = type(value)
        if self._is_new(id(value), value):
            for inside in (*behind(value), *_held_for_good(value)):
                self._follow(inside, path, reader, names, depth)
                if kind is _lru_cache_wrapper and type(inside) is FunctionType:
                    self._runs(inside, path, frozenset())  # where it does not know yet what it gives
            if _is_followed(kind):
                for row in self._save(path, value, reader):
                    if row.kind is CONTEXT:
                        self._contexts.append((row, beginning(reader[0])))
                    if row.kind is not ARRAY:  # of which it has a copy, without end
                        self._inside(row, reader, names, depth - 1)
                self._class(kind, reader[0], names, depth)

    def _inside(self, row: Saved, reader: Reader, names: Iterable[str], depth: int) -> None:
        state = row.before
        rows = state.items() if isinstance(state, dict) else (("", value) for value in row.held())
        for key, value in rows:
            if type(key) is not str or not key.startswith("__"):
                further = depth + (key in _OF_TENSORS)
                self._follow(value, row.path if key == "" else f"{row.path}.{key}", reader, names, further)

    def _module(self, module: ModuleType, reader: Reader, names: frozenset[str], depth: int) -> None:
        if module is os:
            if names & OF_ENVIRONMENT:
                self._named.environment(reader[0])
                if self._is_new(id(os.environ), os.environ):
                    self._save("os.environ", os.environ, reader)
        elif not is_library(module.__name__):
            for name in spelled_in(vars(module), names):
                self._variable(vars(module), name, reader, names, depth)

    def _class(self, kind: type, code: CodeType, names: Iterable[str], depth: int) -> None:
        """A class of the user's: its attributes, and those of its methods that are called."""
        if depth < 1 or is_library(kind.__module__) or not is_observable(kind):
            return
        if self._is_new(id(kind), kind):
            if not issubclass(kind, Enum):
                self._save(kind.__name__, kind, None)
            for base in (*kind.__mro__[1:], type(kind)):
                self._class(base, code, names, depth)
        called = ENTERED.union(names)
        for name, held in list(vars(kind).items()):
            if (function := function_in(held)) is not None:
                if name in called:
                    further = depth - is_installed(function.__code__.co_filename)
                    self._function(function, f"{kind.__name__}.{name}", further)
            elif not isinstance(held, type) and not name.startswith("__"):
                reader = (_NO_CODE, f"{kind.__name__}.{name}")
                self._follow(held, reader[1], reader, names, depth - 1)

    def _is_new(self, key: object, alive: object) -> bool:
        if key in self._seen:
            return False
        self._seen[key] = alive
        return True

    def _save(self, path: str, thing: Any, reader: Reader | None) -> list[Saved]:
        rows = save(path, thing)
        self.saved += rows
        if reader is not None:
            self.readers[id(thing)] = reader
        return rows

    # --- afterwards ----------------------------------------------------------------------------------

    def restore(self) -> None:
        """Give everything back as it was; a cache of calls forgets those of the run."""
        for row in reversed(self.saved):
            is_filled = row.kind is CACHED and row.before[1]
            if not is_filled or any(True for _ in results_kept(row.thing, FakeTensor)):
                row.restore()

    def changed(self) -> list[Saved]:
        """What holds something else now, but for caches of calls, which are asked again."""
        return [row for row in self.saved if row.kind is not CACHED and not row.is_unchanged]

    def variables(self) -> list[tuple[Outside, Source | None]]:
        """Variables near the model whose values may decide and that it does not change, with readers."""
        self._named.imported()
        words = CodeWords(frozenset(self.names), frozenset(self.names))
        for row, source in (each for each in self._contexts if each[0].is_unchanged):
            self._named.walk(of_context(row.thing), source, words)
        for row, source in self._owned:
            for name in self.names & row.before.keys():
                found = as_found(f"{row.path}.{name}", row.thing, partial(static_attribute, name=name))
                if is_plain(found.value) and not isinstance(found.value, Tensor):
                    self._named.add(found, source)
        return [(row.found, row.source) for row in self._named.rows if row.is_unchanged]

    def line_of(self, row: Saved) -> str | None:
        """Where code that reads it names it."""
        reader = self.readers.get(id(row.thing))
        return None if reader is None else line_of(reader)


def _has_no_gradient(parameter: Tensor) -> bool:
    return parameter.grad is None


_NO_CODE = (lambda: None).__code__


def line_of(reader: Reader) -> str | None:
    """The line in which code names something first."""
    outer, name = reader
    if outer is _NO_CODE:
        return None
    for code in codes_in(outer):
        line = code.co_firstlineno
        starts = dict(findlinestarts(code))
        for row in get_instructions(code):
            line = starts.get(row.offset) or line
            if row.argval == name and row.opname.startswith(("LOAD_", "STORE_")):
                return str(Source(code.co_filename, line, code.co_qualname))
    return str(Source(outer.co_filename, outer.co_firstlineno, outer.co_qualname))


def _functions_inside(function: FunctionType) -> tuple[Any, ...]:
    """The functions that one of a library's was made around: what it wraps, or overloads."""
    held = vars(function)
    overloads = held.get("registry")
    wrapped = (held["__wrapped__"],) if "__wrapped__" in held else ()
    return wrapped + (tuple(overloads.values()) if isinstance(overloads, MappingProxyType) else ())


def _held_for_good(value: object) -> tuple[Any, ...]:
    """What a container holds that nobody can change, and of which no state is kept."""
    match value:
        case tuple():
            held: Iterable[Any] = tuple.__iter__(value)
        case frozenset():
            held = frozenset.__iter__(value)
        case MappingProxyType():
            held = value.values()
        case _:
            return ()
    return tuple(islice(held, _MANY))


def _is_followed(kind: type) -> bool:
    """Whether instances of a class keep state that code of the user advances."""
    if kind in (CellType, ContextVar, _lru_cache_wrapper):
        return True
    package = kind.__module__.partition(".")[0]
    return package in _OF_PYTHON or not is_library(kind.__module__)
