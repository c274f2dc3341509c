"""What code names outside of itself: values that may decide, each with the way to where the code finds it.

Of what variables lead to, only what code spells is looked at: attributes by its names, entries by its
constants, and of an object what those of its methods spell that the code may call.
"""

import sys
import threading
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import _lru_cache_wrapper, partial
from operator import itemgetter
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from whence._torch.files import is_library
from whence._torch.observe.attribute_reads import NOTHING, class_attribute, is_observable, own_attributes
from whence._torch.plain_values import PLAIN, PLAIN_IN_WHOLE, same_constant
from whence._torch.record.recorder import FakeTensor
from whence.dependence.code import behind, codes_in, function_in, names_in
from whence.dependence.snapshots import Saved, is_container, save
from whence.dependence.values import content_of, is_constant
from whence.program.arguments.optimizer_arguments import Outside
from whence.provenance import Source

_NOT_ENTERED = (*PLAIN_IN_WHOLE, Tensor, ref, CodeType, torch.Generator, FunctionType, BaseException, Enum)
Step = Callable[[Any], Any]
_HOLDING = (list, tuple, dict, set, frozenset)
_ACCUMULATING = (defaultdict, Counter)
_SEQUENCES = (list, tuple, deque)
_OF_CLASSES = (FunctionType, property, staticmethod, classmethod)
"""What methods are; who has them is looked at."""
_CALLING = (MethodType, partial, _lru_cache_wrapper)
_IMPLIED = frozenset(
    (
        *("__call__", "__enter__", "__exit__", "__iter__", "__next__", "__getitem__", "__getattr__"),
        *("__len__", "__contains__", "__bool__", "__float__", "__int__", "forward", "backward"),
    )
)
"""Methods that code calls without naming them."""
_FAR, _MANY = 6, 64
"""How many steps a value is followed from a variable, and how many entries are looked into."""


class CodeWords(NamedTuple):
    """The names that code looks up, and the constants by which it may ask for entries."""

    names: frozenset[str]
    keys: frozenset[Any]

    @classmethod
    def of(cls, code: CodeType) -> "CodeWords":
        """What a code spells, and the functions written inside it."""
        inner = list(codes_in(code))
        keys = (each for part in inner for each in part.co_consts if type(each) in (str, int))
        return cls(frozenset[str]().union(*map(names_in, inner)), frozenset(keys))

    def and_held(self, held: frozenset[Any]) -> "CodeWords":
        """What code spells, and texts and numbers by which it may look up that it holds."""
        return CodeWords(self.names.union(text for text in held if type(text) is str), self.keys | held)

    def with_(self, other: "CodeWords") -> "CodeWords":
        """What two codes spell."""
        return CodeWords(self.names | other.names, self.keys | other.keys)


@dataclass(frozen=True)
class _Row:
    """A value with its reader, and what it held."""

    found: Outside
    source: Source
    held: list[Saved]

    @property
    def is_unchanged(self) -> bool:
        now = self.found.now()
        is_same = now is self.found.value or same_constant(self.found.value, now)
        return is_same and all(row.is_unchanged for row in self.held)


class NamedValues:
    """Collects values; `is_user` knows the user's code, and `is_inside` what is looked at elsewhere."""

    def __init__(self, is_user: Callable[[CodeType], bool], is_inside: Callable[[object], bool]) -> None:
        self._is_user = is_user
        self._is_inside = is_inside
        self._rows: list[_Row] = []
        self._seen: dict[object, object] = {}
        self._own: dict[tuple[type, CodeWords], CodeWords] = {}

    def add(self, found: Outside, source: Source) -> None:
        """Note a value, whatever it is."""
        held = found.value
        self._rows.append(_Row(found, source, save(found.path, held) if isinstance(held, _HOLDING) else []))

    def walk(self, found: Outside, code: CodeType, spelling: CodeWords, left: int = _FAR) -> None:
        """Note a value that decides by itself; of any other, what the code spells of it."""
        value = found.value
        if _is_of_run(value):
            return
        if is_plain(value) or self._stands_alone(found):
            self._note(found, _beginning(code))
        elif left and self._is_entered(value) and self._is_new((id(value), spelling), value):
            spelling = self._with_methods(value, spelling)
            for part in _parts(found, spelling):
                if part.value is not NOTHING:
                    self.walk(part, code, spelling, left - 1)

    def module(self, module: ModuleType, code: CodeType, spelling: CodeWords) -> None:
        """A file of the user's that code imports, by its name each time."""
        name = module.__name__
        root, way = (sys.modules, (itemgetter(name),)) if sys.modules.get(name) is module else (module, ())
        self.walk(Outside(name, root, way, module), code, spelling)

    def unchanged(self) -> list[tuple[Outside, Source]]:
        """What is still as it was, with readers."""
        return [(row.found, row.source) for row in self._rows if row.is_unchanged]

    def _note(self, found: Outside, source: Source) -> None:
        value = found.value
        key = ("held", id(value)) if isinstance(value, _HOLDING) else (id(found.root), found.path)
        if self._is_new(key, (value, found.root)):
            self.add(found, source)

    def _stands_alone(self, found: Outside) -> bool:
        """Whether a value is a function that closes over nothing: it says all by what it is.

        One that is not the user's stays what it is, but there may be another one in its place.
        """
        value = found.value
        if type(value) is BuiltinFunctionType:
            is_free = value.__self__ is None or isinstance(value.__self__, ModuleType | type)
            return is_free and bool(found.way)
        is_free = type(value) is FunctionType and not value.__closure__
        return is_free and (bool(found.way) or self._is_user(value.__code__))

    def _is_entered(self, value: object) -> bool:
        return not issubclass(type(value), _NOT_ENTERED) and not self._is_inside(value)

    def _is_new(self, key: object, alive: object) -> bool:
        if key in self._seen:
            return False
        self._seen[key] = alive
        return True

    def _with_methods(self, value: object, spelling: CodeWords) -> CodeWords:
        """What code spells, and the methods of the user's that it may call of a value."""
        kind = value if isinstance(value, type) else type(value)
        if (known := self._own.get((kind, spelling))) is None:
            known = self._own[kind, spelling] = _with_methods(kind, spelling)
        return known


def _is_of_run(value: object) -> bool:
    """Whether a run has put it there: a tensor of its own, alone or in a container, not to be kept alive."""
    kind = type(value)
    if not issubclass(kind, (dict, *_SEQUENCES)):
        return issubclass(kind, FakeTensor)
    held: Any = dict.values(value) if isinstance(value, dict) else value
    return any(issubclass(type(each), FakeTensor) for each in held)


def _with_methods(kind: type, spelling: CodeWords) -> CodeWords:
    written = [base for base in kind.__mro__ if is_observable(base) and not is_library(base.__module__)]
    waiting = {name: held for base in reversed(written) for name, held in vars(base).items()}
    called = [name for name in waiting if name in _IMPLIED or name in spelling.names]
    while called:
        for name in called:
            if (function := function_in(waiting.pop(name))) is not None:
                spelling = spelling.with_(CodeWords.of(function.__code__))
        called = [name for name in waiting if name in spelling.names]
    return spelling


def _parts(found: Outside, spelling: CodeWords) -> Iterator[Outside]:
    """What a value holds that code may ask for."""
    value, kind = found.value, type(found.value)
    if issubclass(kind, ModuleType):
        names = () if is_library(value.__name__) else sorted(spelling.names & vars(value).keys())
        yield from (_of_module(found, name) for name in names)
    elif issubclass(kind, type):
        yield from _of_class(value, spelling)
    elif isinstance(value, _CALLING):
        yield from (Outside(found.path, part, (), part) for part in behind(value))
    else:
        if _goes_as_pythons(kind):
            yield from _entries(found, spelling)
        if _has_attributes(kind):
            owner = found.path.removeprefix("global ").removeprefix("closure ")
            for name in sorted(spelling.names):
                way: tuple[Step, ...] = (*found.way, partial(held_attribute, name=name))
                held = held_attribute(value, name)
                if type(held) not in _OF_CLASSES:
                    yield Outside(f"{owner}.{name}", found.root, way, held)


def _of_module(found: Outside, name: str) -> Outside:
    """A variable of a file; of the one that is there then, where code comes to it by a name."""
    variables = vars(found.value)
    if not found.way:
        return Outside(f"global {name}", variables, (itemgetter(name),), variables[name])
    way: tuple[Step, ...] = (*found.way, partial(held_attribute, name=name))
    return Outside(f"global {found.value.__name__}.{name}", found.root, way, variables[name])


def _has_attributes(kind: type) -> bool:
    """Whether objects of a class are a user's, or what Python has for settings."""
    if issubclass(kind, (SimpleNamespace, Namespace, threading.local)):
        return True
    return is_observable(kind) and not is_library(kind.__module__)


def _of_class(kind: type, spelling: CodeWords) -> Iterator[Outside]:
    """The attributes of a class of the user's, and of a class that makes such."""
    if not is_observable(kind) or is_library(kind.__module__) or issubclass(kind, (BaseException, Enum)):
        return
    for name in sorted(spelling.names):
        way: tuple[Step, ...] = (partial(held_attribute, name=name),)
        held = class_attribute(kind, name)
        if type(held) not in _OF_CLASSES:
            yield Outside(f"{kind.__name__}.{name}", kind, way, held)
    if not is_library(type(kind).__module__):
        yield Outside(type(kind).__name__, type(kind), (), type(kind))


def _entries(found: Outside, spelling: CodeWords) -> Iterator[Outside]:
    """The entries of a container: those that code spells, and of others what holds something itself."""
    held = found.value
    if isinstance(held, dict):
        pairs: Any = dict.items(held)
    elif isinstance(held, _SEQUENCES):
        pairs = enumerate(held)
    else:
        return
    for position, (key, value) in enumerate(list(pairs)):
        is_spelled = key in spelling.keys if type(key) in (str, int) else False
        if not is_spelled and isinstance(held, _SEQUENCES):
            is_spelled = key - len(held) in spelling.keys
        if is_spelled or (position < _MANY and type(value) not in PLAIN and not isinstance(value, Tensor)):
            yield Outside(f"{found.path}[{key!r}]", found.root, (*found.way, itemgetter(key)), value)


def held_attribute(thing: Any, name: str) -> Any:
    """An attribute of an object or a class, found without running any code of theirs."""
    if isinstance(thing, type):
        return class_attribute(thing, name)
    own = thing.__dict__ if issubclass(type(thing), threading.local) else own_attributes(thing)
    held = own.get(name, NOTHING)
    if held is NOTHING:
        held = class_attribute(type(thing), name)
    return held.__get__(thing) if type(held) is MemberDescriptorType else held


def is_plain(value: object) -> bool:
    """Whether a value decides by what it is: numbers, texts, flags, tensors, arrays, and small containers.

    None and empty containers are what is filled by whoever comes first.
    """
    if isinstance(value, Tensor):
        return True
    kind = type(value)
    if issubclass(kind, _HOLDING):
        if kind not in _HOLDING and (issubclass(kind, _ACCUMULATING) or not _goes_as_pythons(kind)):
            return False
        return _holds_plain(value)
    if value is None or issubclass(kind, (ModuleType, type)):
        return False
    return is_constant(value) or content_of(value) is not None


def _goes_as_pythons(kind: type) -> bool:
    return is_container(kind) or (issubclass(kind, tuple) and kind.__iter__ is tuple.__iter__)


def _holds_plain(value: Any) -> bool:
    held: Any = dict.values(value) if isinstance(value, dict) else value
    if isinstance(value, dict) and not all(isinstance(key, str) for key in dict.keys(value)):
        return False  # a registry, which grows with every model that is made
    return 0 < len(held) <= _MANY and all(each is not None and type(each) in PLAIN for each in held)


def _beginning(code: CodeType) -> Source:
    return Source(code.co_filename, code.co_firstlineno, code.co_qualname)
