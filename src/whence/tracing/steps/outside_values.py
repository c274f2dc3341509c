"""What a step reads outside of itself: constants of its program, which a bound step compares in every call.

Which variables a function uses is read off its code. Which attributes it reads of a trainer, or of what that
holds, is seen while it runs. Of a container all entries count.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from dis import get_instructions
from enum import Enum
from functools import partial
from logging import Logger
from numbers import Number
from operator import attrgetter, methodcaller
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from whence._torch.files import is_library
from whence._torch.observe.attribute_reads import (
    NOTHING,
    ReadObserver,
    class_attribute,
    is_observable,
    own_attributes,
)
from whence._torch.plain_values import PLAIN_IN_WHOLE
from whence.dependence.code import OF_ENVIRONMENT, defaults_of, environment_names, function_in, names_in
from whence.dependence.snapshots import CONTAINERS, VARIABLE, Saved, is_iterator
from whence.dependence.values import content_of
from whence.errors import Place, UnsupportedStep
from whence.program.arguments.optimizer_arguments import Outside
from whence.tracing.reads.named_values import default_of, held_attribute
from whence.tracing.reads.nondeterminism import ImpureCalls
from whence.tracing.steps.enclosed_state import (
    Enclosed,
    functions_of,
    globals_of,
    is_looked_at_whole,
    owners_of,
    refuse_changed,
    variables_of,
    wrappers_of,
)
from whence.tracing.steps.host.stand_ins import is_stand_in
from whence.tracing.target.subject import Subject

_PLAIN = (*PLAIN_IN_WHOLE, Number, Enum, BuiltinFunctionType, type, partial)
_LEFT = (nn.Module, nn.Parameter, Optimizer, ModuleType, Logger)
"""What is the model's, or compared elsewhere, or decides nothing."""
_CALLED = (BuiltinFunctionType, type, partial)
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, MappingProxyType)
_MOST = 10_000
"""Entries of a container that are compared; of a larger one it is how many there are."""
_AS_HELD = (FunctionType, MemberDescriptorType, staticmethod, classmethod)
"""What a class may hold whose lookup computes nothing."""


class Extent(NamedTuple):
    """What kind of container it is, and which entries it has."""

    kind: type
    keys: Any

    def __repr__(self) -> str:
        keys = self.keys if isinstance(self.keys, int) else ", ".join(map(repr, self.keys)) or 0
        return f"a {self.kind.__name__} of {keys}"


def _attribute(at: Outside, name: str) -> Outside:
    """On to an attribute."""
    return Outside(f"{at.path}.{name}", at.root, (*at.way, attrgetter(name)), None)


def _item(at: Outside, key: Any) -> Outside:
    """On to an entry."""
    return Outside(f"{at.path}[{key!r}]", at.root, (*at.way, partial(entry, key)), None)


def entry(key: Any, held: Any) -> Any:
    """An entry; asking for one must not make it."""
    return dict.get(held, key, NOTHING) if isinstance(held, dict) else held[key]


def _is_iterator(value: Any) -> bool:
    """Whether something is an iterator that nobody can look into: one in C, or one of PyTorch's loaders."""
    kind = type(value)
    return is_iterator(value) or (
        kind.__module__.startswith("torch.utils.data") and hasattr(kind, "__next__")
    )


def _extent(held: Any) -> Extent:
    return Extent(
        type(held), tuple(held) if isinstance(held, _MAPPINGS) and len(held) <= _MOST else len(held)
    )


def _extent_but_for(keys: Set[Any], held: Any) -> Extent:
    """Without keys that the step puts there itself."""
    return _extent({key: None for key in held if key not in keys})._replace(kind=type(held))


def _is_unchanged(row: Outside) -> bool:
    now = row.now()
    return now is row.value or (isinstance(now, (bytes, tuple, frozenset)) and now == row.value)


class OutsideReads:
    """Notes what a step reads that is neither its own, nor an argument, nor the model's; `hooks` are
    functions that its backward calls."""

    def __init__(
        self,
        subject: Subject,
        observer: ReadObserver,
        enclosed: Enclosed,
        sources: ImpureCalls,
        hooks: Iterable[Any] = (),
    ) -> None:
        self._enclosed = enclosed
        self._sources = sources
        self._observer = observer
        self._calls = (subject.call, *hooks)
        self._place = Place(None, subject.place.line)
        self._inside = {id(row.tensor) for row in subject.state}
        self._inside |= {id(module) for _, module in subject.named_modules()}
        self._places: dict[int, Outside] = {}
        self._rows: dict[tuple[int, str], Outside] = {}
        self._functions: dict[CodeType, FunctionType] = {}
        self._classes = set[tuple[type, CodeType]]()
        self._packages = {_package(function) for call in self._calls for function in functions_of(call)}

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Look at the step's variables, and watch what it belongs to, while reads are observed; `inputs` are
        no constants."""
        self._inside |= {id(tensor) for tensor in inputs}
        for call in self._calls:
            for function in (*wrappers_of(call), *functions_of(call)):
                self._follow(function)
            for name, owner in owners_of(call):
                self._look(owner, Outside(name, owner, (), None))
                if isinstance(owner, nn.Module):
                    self._watch(owner, Outside(name, owner, (), None))

    def found(self, place: Place) -> tuple[Outside, ...]:
        """Everything, in the order it was met; raises `UnsupportedStep` for what has changed since."""
        rows = tuple(self._rows.values())
        refuse_changed((row.path for row in rows if not _is_unchanged(row)), place)
        return rows

    def read(self, holder: object, name: str, value: object) -> bool:
        """An attribute was looked up and found; False for one of another object."""
        way = self._places.get(id(holder))
        if way is None:
            return False
        if self._is_written(holder, name, value):
            return True
        if _package(type(holder)) in self._packages:
            self._sources.held(value)
        attribute = class_attribute(type(holder), name)
        is_held = name in own_attributes(holder) or not hasattr(type(attribute), "__get__")
        if isinstance(attribute, property) and isinstance(attribute.fget, FunctionType):
            self._follow(attribute.fget)
        elif attribute is NOTHING and name not in own_attributes(holder):
            pass  # it was computed by `__getattr__`, and what that reads is seen
        elif is_held or isinstance(attribute, _AS_HELD):
            self._look(value, _attribute(way, name))
        return True

    def _is_written(self, holder: object, name: str, value: object) -> bool:
        """Whether the step reads what it has put there itself."""
        is_held = name in own_attributes(holder) and own_attributes(holder)[name] is value
        return is_held and self._enclosed.has_changed(holder, name)

    def missing(self, holder: object, name: str) -> bool:
        """An attribute was looked for and not found; False for one of another object."""
        way = self._places.get(id(holder))
        if way is not None:
            self._note(NOTHING, _attribute(way, name))
        return way is not None

    def _note(self, value: Any, way: Outside) -> None:
        self._rows.setdefault((id(way.root), way.path), replace(way, value=value))

    def _watch(self, thing: object, way: Outside) -> None:
        if id(thing) not in self._inside and self._observer.observe_class_of(thing):
            self._places.setdefault(id(thing), way)
            if not isinstance(thing, nn.Module):
                self._enclosed.reach(way.path, thing)

    def _look(self, value: Any, way: Outside, around: tuple[int, ...] = ()) -> None:
        """Note a value, or what is in it; an object's attributes when they are read."""
        kind = type(value)  # `isinstance` would ask the thing itself for its class
        if id(value) in self._inside or issubclass(kind, _LEFT) or is_stand_in(value):
            return
        if _is_iterator(value):
            raise self._taken_from(way)
        if is_looked_at_whole(value) or issubclass(kind, (*CONTAINERS, SimpleNamespace)):
            self._enclosed.reach(way.path, value)
        if issubclass(kind, (*_PLAIN, Tensor)):
            self._note(value, way)
        elif content_of(value) is not None:
            self._note(content_of(value), replace(way, way=(*way.way, content_of)))
        elif issubclass(kind, FunctionType):
            self._note(value, way)
            self._follow(value)
        elif issubclass(kind, MethodType):
            self._look(value.__self__, _attribute(way, "__self__"))
            self._follow(value.__func__)
        else:
            self._look_inside(value, way, around)
        if not issubclass(kind, (*_PLAIN, *_SEQUENCES, FunctionType, MethodType, Tensor)):
            self._watch(value, way)

    def _look_inside(self, value: Any, way: Outside, around: tuple[int, ...]) -> None:
        kind = type(value)
        if issubclass(kind, (set, frozenset)):
            if all(issubclass(type(member), _PLAIN) for member in value):
                self._note(frozenset(value), replace(way, way=(*way.way, frozenset)))
        elif issubclass(kind, (*_MAPPINGS, *_SEQUENCES)) and id(value) not in around:
            self._look_into(value, way, (*around, id(value)))
        elif issubclass(kind, SimpleNamespace) and id(value) not in around:
            for name, held in vars(value).items():
                self._look(held, _attribute(way, name), (*around, id(value)))

    def _taken_from(self, way: Outside) -> UnsupportedStep:
        return UnsupportedStep(
            f"the step has {way.path}, which is an iterator",
            where=self._place,
            why="what it takes from it would be a constant of the program, the same in every run",
            remedy="take it outside of the step, and pass it as an argument",
        )

    def _look_into(self, held: Any, way: Outside, around: tuple[int, ...]) -> None:
        keys: Sequence[Any] = list(held) if isinstance(held, _MAPPINGS) else range(len(held))
        if not all(issubclass(type(key), _PLAIN) for key in keys):
            return
        put = frozenset(key for key in keys if isinstance(held, dict) and is_stand_in(held[key]))
        extent = partial(_extent_but_for, put) if put else _extent
        self._note(extent(held), replace(way, way=(*way.way, extent)))
        if len(held) <= _MOST:
            for key in keys:
                self._look(entry(key, held), _item(way, key), around)

    def _follow(self, function: Any) -> None:
        """Look at the variables of a function, if it belongs to what the step belongs to."""
        if not isinstance(function, FunctionType) or function.__code__ in self._functions:
            return
        if _package(function) not in self._packages:
            return
        self._functions[function.__code__] = function
        self._enclosed.reach(function.__name__, function)
        for name in globals_of(function.__code__):
            self._sources.answers_for(function.__globals__, name)
        for row in variables_of(function):
            if self._is_watched(row):
                continue
            way = _way_to(row)
            self._look(row.before, way)
            if isinstance(row.before, ModuleType):
                self._look_at_module(row.before, way, function.__code__)
            elif isinstance(row.before, type):
                self._look_at_class(row.before, function.__code__)
        for way in _of_function(function):
            self._look(way.value, way)

    def _look_at_class(self, kind: type, code: CodeType) -> None:
        """What code names of a class of the user's, and what its methods name that code calls."""
        if not is_observable(kind) or is_library(kind.__module__) or issubclass(kind, _LEFT):
            return
        if (kind, code) in self._classes:
            return
        self._classes.add((kind, code))
        for name in sorted(names_in(code)):
            way = Outside(f"{kind.__name__}.{name}", kind, (partial(held_attribute, name=name),), None)
            held = class_attribute(kind, name)
            if (function := function_in(held)) is not None:
                self._note(held, way)
                self._look_at_class(kind, function.__code__)
            elif held is not NOTHING:
                self._look(held, way)

    def _is_watched(self, row: Saved) -> bool:
        if self._sources.is_put(row.before):
            return True
        if row.kind is VARIABLE:
            return self._sources.named(row.thing.namespace, row.thing.name)
        return self._sources.closed_over(row.thing)

    def _look_at_module(self, module: ModuleType, way: Outside, code: CodeType) -> None:
        for name in _attributes_of(way.path, code):
            value = vars(module).get(name, NOTHING)
            if issubclass(type(value), (*_PLAIN, Tensor)) and not isinstance(value, _CALLED):
                self._look(value, _attribute(way, name))


def _package(held: FunctionType | type) -> str:
    """Where its code is; a decorator calls itself as what it is around."""
    name = held.__module__ if isinstance(held, type) else held.__globals__.get("__name__")
    return str(name).partition(".")[0]


def _of_function(function: FunctionType) -> Iterator[Outside]:
    """Its defaults, attributes of its own that its code names, and what it asks the environment for."""
    code = function.__code__
    last = code.co_argcount - len(function.__defaults__ or ())
    names = (*code.co_varnames[last : code.co_argcount], *(function.__kwdefaults__ or {}))
    for position, (name, value) in enumerate(zip(names, defaults_of(function), strict=True)):
        yield Outside(name, function, (partial(default_of, default=position),), value)
    for name in sorted(names_in(code) & vars(function).keys()):
        yield Outside(f"{function.__name__}.{name}", function, (attrgetter(name),), vars(function)[name])
    if not names_in(code).isdisjoint(OF_ENVIRONMENT):
        for name in environment_names(code):
            way = (methodcaller("get", name),)
            yield Outside(f"os.environ[{name!r}]", os.environ, way, os.environ.get(name))


def _way_to(variable: Saved) -> Outside:
    """A variable as it is reached."""
    if variable.kind is VARIABLE:
        namespace = variable.thing.namespace
        return Outside(variable.path, namespace, (partial(entry, variable.path),), None)
    return Outside(variable.path, variable.thing, (attrgetter("cell_contents"),), None)


def _attributes_of(name: str, code: CodeType) -> Iterator[str]:
    """The attributes that code asks a variable for by its name."""
    before = None
    for row in get_instructions(code):
        if before == name and row.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield row.argval
        before = row.argval if row.opname in ("LOAD_GLOBAL", "LOAD_DEREF") else None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _attributes_of(name, inner)
