"""What code names outside of itself: values that may decide, each with the way to where the code finds it.

Of what variables lead to, only what code spells is looked at: attributes by its names, entries by its
constants, and of an object what those of its methods spell that the code may call.
"""

import os
import sys
import threading
from argparse import Namespace
from collections import ChainMap, Counter, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import _lru_cache_wrapper, partial, partialmethod
from itertools import islice
from operator import attrgetter, itemgetter, methodcaller
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from whence._torch.fakes import FakeTensor
from whence._torch.files import WHENCE, is_library
from whence._torch.observe.attribute_reads import NOTHING, class_attribute, is_observable
from whence._torch.plain_values import PLAIN, PLAIN_IN_WHOLE, same_constant
from whence.dependence.code import (
    behind,
    defaults_of,
    environment_names,
    function_in,
    globals_within,
    imported,
)
from whence.dependence.describe import HELD_BY_CLASSES
from whence.dependence.lookup import static_attribute
from whence.dependence.snapshots import Saved, content_of_cell, is_container, save
from whence.dependence.values import content_of, is_constant
from whence.program.arguments.optimizer_arguments import Outside
from whence.provenance import Source
from whence.tracing.reads.code_words import FOR_ALL, CodeWords
from whence.tracing.reads.outside_modules import children_of, facts_of
from whence.tracing.reads.type_queries import is_answer

_NOT_ENTERED = (*PLAIN_IN_WHOLE, Tensor, CodeType, torch.Generator, BaseException, Enum)
Step = Callable[[Any], Any]
_HOLDING = (list, tuple, dict, set, frozenset)
_ACCUMULATING = (defaultdict, Counter)
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, MappingProxyType, ChainMap, UserDict)
OF_CLASSES = (FunctionType, *HELD_BY_CLASSES)
_CALLING = (MethodType, partial, partialmethod, _lru_cache_wrapper, ref)
_LEADING = (type, ref, FunctionType, MappingProxyType, ModuleType)
"""What an attribute may hold that decides by what it leads to."""
_IMPLIED = frozenset(
    (
        *("__call__", "__enter__", "__exit__", "__iter__", "__next__", "__getitem__", "__getattr__"),
        *("__len__", "__contains__", "__bool__", "__float__", "__int__", "__index__", "__get__", "__eq__"),
        *("__lt__", "__le__", "__gt__", "__ge__", "__mul__", "__rmul__", "forward", "backward"),
    )
)
"""Methods that code calls without naming them."""
FAR, _MANY = 6, 64
"""How many steps a value is followed from a variable, and how many entries are looked into."""


@dataclass(frozen=True)
class NamedRow:
    """A value with its reader, and what it held."""

    found: Outside
    source: Source | None
    held: list[Saved]

    @property
    def is_unchanged(self) -> bool:
        """Whether there still is what there was."""
        now = self.found.now()
        is_same = now is self.found.value or same_constant(self.found.value, now)
        return is_same and all(row.is_unchanged for row in self.held)


class NamedValues:
    """Collects values; `is_user` knows the user's code, and `is_inside` what is looked at elsewhere."""

    def __init__(self, is_user: Callable[[CodeType], bool], is_inside: Callable[[object], bool]) -> None:
        self.rows: list[NamedRow] = []
        self._is_user = is_user
        self._is_inside = is_inside
        self._imports: list[tuple[FunctionType, CodeWords]] = []
        self._seen: dict[object, object] = {}
        self._own: dict[tuple[type, CodeWords], CodeWords] = {}

    def add(self, found: Outside, source: Source | None) -> None:
        """Note a value, whatever it is."""
        held = found.value
        self.rows.append(
            NamedRow(found, source, save(found.path, held) if isinstance(held, _HOLDING) else [])
        )

    def function(self, function: FunctionType, path: str, spelling: CodeWords) -> None:
        """Note what a function names: variables of its file and of those around it, defaults, imports."""
        source = beginning(function.__code__)
        for found in variables_of(function):
            self.walk(found, source, spelling)
        for position, value in enumerate(defaults_of(function)):
            if self._is_default_noted(value):
                where, step = f"a default argument of {path}", partial(default_of, default=position)
                self.walk(Outside(where, function, (step,), value), source, spelling)
        self._imports.append((function, spelling))

    def environment(self, code: CodeType) -> None:
        """Note what code asks the environment for."""
        for name in environment_names(code):
            path, way = f"os.environ[{name!r}]", (methodcaller("get", name),)
            self._note(Outside(path, os.environ, way, os.environ.get(name)), beginning(code))

    def walk(self, found: Outside, source: Source | None, spelling: CodeWords, left: int = FAR) -> None:
        """Note a value that decides by itself; of any other, what the code spells of it."""
        value = found.value
        if self._is_left(found):
            return
        if issubclass(type(value), nn.Module) and not self._is_inside(value):
            self._module(found, source, spelling)
        is_whole = is_plain(value)
        if is_whole or (found.way and self._says_what_it_is(value)) or self._stands_alone(found):
            self._note(found, source)
        if is_whole or not left or not self._is_entered(value):
            return
        if self._is_new((*self._key_to_enter(found), spelling), value):
            spelling = self._spelled_of(value, spelling)
            for part in self._parts(found, spelling):
                self.walk(part, source, spelling, left - 1)

    def _module(self, found: Outside, source: Source | None, spelling: CodeWords) -> None:
        """Note a module that the model does not hold, and those inside it, however deep they lie."""
        if not self._is_new(("module", *self._key_to_enter(found)), found.value):
            return
        for part in facts_of(found):
            if self._is_new((id(part.root), part.path), part.root):
                self.add(part, source)
        for part in methods_of(type(found.value), self._spelled_of(found.value, spelling)):
            self.walk(part, source, spelling)
        for child in children_of(found):
            self.walk(child, source, spelling)

    def held(self, owner: type, value: object, path: str) -> None:
        """Something that an instance of a class holds under an attribute, which is compared for itself: what
        else its forward spells of it, and the methods that it may call of it."""
        function = function_in(class_attribute(owner, "forward"))
        if function is None:
            return
        source, spelling = beginning(function.__code__), CodeWords.of(function.__code__)
        spelling = self._with_methods(owner, spelling)
        if isinstance(value, _LEADING):
            self.walk(Outside(path, value, (), value), source, spelling)
        elif _has_attributes(type(value)):
            for part in methods_called(type(value), spelling):
                self.walk(part, source, spelling, 0)

    def imported(self) -> None:
        """Note what functions import, once that is there: files of the user's, by their names each time."""
        for function, spelling in self._imports:
            for module in imported(function.__code__, function.__globals__):
                name = module.__name__
                is_by_name = sys.modules.get(name) is module
                root, way = (sys.modules, (itemgetter(name),)) if is_by_name else (module, ())
                self.walk(Outside(name, root, way, module), beginning(function.__code__), spelling)

    # --- what counts -------------------------------------------------------------------------------------

    def _is_left(self, found: Outside) -> bool:
        """Whether a value is neither noted nor entered."""
        return is_of_run(found.value) or _is_ours(found.value)

    def _is_default_noted(self, value: object) -> bool:
        """Others are compared with the function."""
        return type(value) not in PLAIN and not isinstance(value, Tensor)

    def _says_what_it_is(self, value: object) -> bool:
        return _says_what_it_is(value)

    def _key_to_enter(self, found: Outside) -> tuple[object, ...]:
        return (id(found.value),)

    def _key_to_note(self, found: Outside) -> tuple[object, ...]:
        value = found.value
        return ("held", id(value)) if isinstance(value, _HOLDING) else (id(found.root), found.path)

    def _note(self, found: Outside, source: Source | None) -> None:
        if self._is_new(self._key_to_note(found), (found.value, found.root)):
            self.add(found, source)

    def _stands_alone(self, found: Outside) -> bool:
        """Whether a value is a function, in whose place there may be another one; where nothing can be, it is
        compared if it is the user's and closes over nothing."""
        value = found.value
        if type(value) is BuiltinFunctionType:
            is_free = value.__self__ is None or isinstance(value.__self__, ModuleType | type)
            return is_free and bool(found.way)
        is_free = type(value) is FunctionType and not value.__closure__ and self._is_user(value.__code__)
        return is_free or (isinstance(value, OF_CLASSES) and bool(found.way))

    def _is_entered(self, value: object) -> bool:
        return not issubclass(type(value), _NOT_ENTERED) and not self._is_inside(value)

    def _parts(self, found: Outside, spelling: CodeWords) -> Iterator[Outside]:
        return values_held(found, spelling)

    def _is_new(self, key: object, alive: object) -> bool:
        if key in self._seen:
            return False
        self._seen[key] = alive
        return True

    def _spelled_of(self, value: object, spelling: CodeWords) -> CodeWords:
        """What code spells, and the function behind a value, and the methods that it may call of it."""
        spelling = self._with_methods(value, spelling)
        function = _function_behind(value)
        return spelling if function is None else spelling.with_(CodeWords.of(function.__code__))

    def _with_methods(self, value: object, spelling: CodeWords) -> CodeWords:
        """What code spells, and the methods of the user's that it may call of a value."""
        kind = value if isinstance(value, type) else type(value)
        if (known := self._own.get((kind, spelling))) is None:
            known = self._own[kind, spelling] = _with_methods(kind, spelling)
        return known


def beginning(code: CodeType) -> Source:
    """Where code begins."""
    return Source(code.co_filename, code.co_firstlineno, code.co_qualname)


def variables_of(function: FunctionType) -> Iterator[Outside]:
    """The variables that a function uses, of its file and of the functions around it."""
    code, variables = function.__code__, function.__globals__
    for name in sorted(globals_within(code) & variables.keys()):
        yield Outside(f"global {name}", variables, (itemgetter(name),), variables[name])
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and (held := content_of_cell(cell)) is not NOTHING:
            yield Outside(f"closure {name}", cell, (attrgetter("cell_contents"),), held)


def _is_ours(value: object) -> bool:
    """Whether it is there for the run alone: what stands for `type`, or a function of ours in the place of
    one that is watched."""
    is_function = type(value) is FunctionType and value.__code__.co_filename.startswith(WHENCE)
    return is_function or is_answer(value)


def is_of_run(value: object) -> bool:
    """Whether a run has put it there: a tensor of its own, alone or in a container, not to be kept alive."""
    kind = type(value)
    if not issubclass(kind, (dict, *_SEQUENCES)):
        return issubclass(kind, FakeTensor)
    held: Any = dict.values(value) if isinstance(value, dict) else value
    return any(issubclass(type(each), FakeTensor) for each in held)


def _with_methods(kind: type, spelling: CodeWords) -> CodeWords:
    meta: type = type(kind)
    bases = (*kind.__mro__, *meta.__mro__)
    written = [base for base in bases if is_observable(base) and not is_library(base.__module__)]
    waiting = {name: held for base in reversed(written) for name, held in vars(base).items()}
    called = [name for name in waiting if name in _IMPLIED or name in spelling.names]
    while called:
        for name in called:
            held = waiting.pop(name)
            if (function := _function_behind(held) or function_in(held)) is not None:
                spelling = spelling.with_(CodeWords.of(function.__code__))
        called = [name for name in waiting if name in spelling.names]
    return spelling


def values_held(found: Outside, spelling: CodeWords) -> Iterator[Outside]:
    """What a value holds that code may ask for."""
    value, kind = found.value, type(found.value)
    if issubclass(kind, ModuleType):
        names = () if is_library(value.__name__) else sorted(spelling.names & vars(value).keys())
        yield from (of_module(found, name) for name in names)
    elif issubclass(kind, type):
        yield from _of_class(value, spelling)
    elif isinstance(value, _CALLING):
        for position, part in enumerate(_things_behind(value)):
            step = partial(part_behind, position=position)
            path = f"{found.path}{_access_behind(value, position)}"
            yield Outside(path, found.root, (*found.way, step), part)
    elif issubclass(kind, OF_CLASSES):
        yield from _of_function(found, spelling)
    else:
        if _goes_as_pythons(kind) or issubclass(kind, _MAPPINGS):
            yield from _entries(found, spelling)
        if _has_attributes(kind):
            yield from _of_object(found, spelling)


def _of_function(found: Outside, spelling: CodeWords) -> Iterator[Outside]:
    """What a function has as attributes; the table of its overloads is entered whatever code spells."""
    function = function_in(found.value)
    for name, held in sorted(vars(function).items()) if function is not None else ():
        if name in spelling.names or type(held) is MappingProxyType:
            way: tuple[Step, ...] = (*found.way, partial(static_attribute, name=name))
            yield Outside(f"{found.path}.{name}", found.root, way, held)
            if type(held) is MappingProxyType:
                yield Outside(f"the keys of {found.path}.{name}", found.root, (*way, tuple), tuple(held))


def attribute_of(found: Outside, name: str, held: object) -> Outside:
    """On to an attribute."""
    owner = found.path.removeprefix("global ").removeprefix("closure ")
    return Outside(f"{owner}.{name}", found.root, (*found.way, partial(static_attribute, name=name)), held)


def of_class(kind: type, name: str, held: object) -> Outside:
    """What a class holds, by its name."""
    return Outside(f"{kind.__name__}.{name}", kind, (partial(static_attribute, name=name),), held)


def _of_object(found: Outside, spelling: CodeWords) -> Iterator[Outside]:
    """Attributes of an object, and the methods of its class."""
    for name in sorted(spelling.names):
        held = static_attribute(found.value, name)
        if isinstance(held, OF_CLASSES) and type(held) is not FunctionType:
            continue  # a function may be covered by one of the object's own
        if held is not NOTHING or name in spelling.asked:
            yield attribute_of(found, name, held)
    yield from methods_called(type(found.value), spelling)


def methods_called(kind: type, spelling: CodeWords) -> Iterator[Outside]:
    """What code calls of the instances of a class; modules are looked at elsewhere."""
    return iter(()) if issubclass(kind, nn.Module) else methods_of(kind, spelling)


def methods_of(kind: type, spelling: CodeWords) -> Iterator[Outside]:
    """What code calls of the instances of a class, where it or a base of it is the user's."""
    written = [base for base in kind.__mro__ if is_observable(base) and not is_library(base.__module__)]
    for base in written:
        for name in sorted(vars(base).keys() & (_IMPLIED | spelling.names)):
            if isinstance(held := vars(base)[name], OF_CLASSES):
                yield of_class(base, name, held)


def of_module(found: Outside, name: str) -> Outside:
    """A variable of a file; of the one that is there then, where code comes to it by a name."""
    variables = vars(found.value)
    if not found.way:
        return Outside(f"global {name}", variables, (itemgetter(name),), variables[name])
    way: tuple[Step, ...] = (*found.way, partial(static_attribute, name=name))
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
    is_filled = issubclass(kind, nn.Module) or is_dataclass(kind)  # by instances, which are looked at
    for name in sorted(spelling.names):
        held = class_attribute(kind, name)
        if held is not NOTHING and not isinstance(held, OF_CLASSES) and not (held is None and is_filled):
            yield of_class(kind, name, held)
    yield from methods_called(kind, spelling)
    yield from methods_called(type(kind), spelling)
    if not is_library(type(kind).__module__):
        yield Outside(type(kind).__name__, type(kind), (), type(kind))


def _entries(found: Outside, spelling: CodeWords) -> Iterator[Outside]:
    """The entries of a container: those that code spells, and of others what holds something itself."""
    held = found.value
    if isinstance(held, _MAPPINGS):
        pairs: Any = items_of(held)
    elif isinstance(held, _SEQUENCES):
        pairs = enumerate(held)
    else:
        return
    if isinstance(held, dict) and len(found.way) <= 1 and _goes_through(held, found.path, spelling):
        yield Outside(f"the keys of {found.path}", found.root, (*found.way, tuple), tuple(held))
    is_noted = _says_what_it_is(held)
    for position, (key, value) in enumerate(list(pairs)):
        if is_noted and type(value) in PLAIN:
            continue
        is_spelled = key in spelling.keys if type(key) in (str, int) else False
        if not is_spelled and isinstance(held, _SEQUENCES):
            is_spelled = key - len(held) in spelling.keys
        if is_spelled or (position < _MANY and type(value) not in PLAIN and not isinstance(value, Tensor)):
            yield Outside(f"{found.path}[{key!r}]", found.root, (*found.way, itemgetter(key)), value)


def _goes_through(held: dict[Any, Any], path: str, spelling: CodeWords) -> bool:
    """Whether code may ask for all entries; a registry under keys of its own grows with every model."""
    is_looked_up = path.removeprefix("global ").removeprefix("closure ") in spelling.looked_up
    asks = not (is_looked_up or spelling.names.isdisjoint(FOR_ALL))
    return asks and 0 < len(held) <= _MANY and all(isinstance(key, str) for key in held)


def value_at(held: Any, position: int) -> Any:
    """The value of an entry of a mapping, whose keys are compared by themselves."""
    _, value = next(islice(items_of(held), position, None), (None, NOTHING))
    return value


def items_of(held: Any) -> Iterable[tuple[Any, Any]]:
    """The entries of a mapping, by no code of its class's where that is a dictionary."""
    return dict.items(held) if isinstance(held, dict) else held.items()


def _access_behind(thing: Any, position: int) -> str:
    """How a person reads it; what is called says itself what it is."""
    if not position:
        return ""
    if not isinstance(thing, partial | partialmethod):
        return ".__self__"
    keywords = [f".keywords[{name!r}]" for name in thing.keywords]
    return [*(f".args[{at}]" for at, _ in enumerate(thing.args)), *keywords][position - 1]


def part_behind(thing: Any, position: int) -> Any:
    """One of what is behind a callable; raises `LookupError` where something else has taken its place."""
    return _things_behind(thing)[position]


def _things_behind(thing: Any) -> tuple[Any, ...]:
    return (thing(),) if isinstance(thing, ref) else behind(thing)


def default_of(function: FunctionType, default: int) -> Any:
    """One of the defaults of its arguments; raises `LookupError` where it has fewer now."""
    return defaults_of(function)[default]


def _function_behind(value: Any) -> FunctionType | None:
    """The function that a method is, or that is called with what else there is."""
    if isinstance(value, MethodType | partialmethod):
        return function_in(value.__func__ if isinstance(value, MethodType) else value.func)
    return None


def _says_what_it_is(value: Any) -> bool:
    """Whether another one in its place decides, whatever it holds: a class, nothing yet, or a row of things
    that are not numbers."""
    if value is None or value is NOTHING or isinstance(value, type):
        return True
    return type(value) in _SEQUENCES and len(value) <= _MANY and not any(map(is_of_run, value))


def is_plain(value: object) -> bool:
    """Whether a value decides by what it is: numbers, texts, flags, tensors, arrays, and small containers.

    None is what is replaced by whoever comes first; what a run fills itself is left out afterwards.
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
    if not issubclass(kind, tuple):
        return is_container(kind)
    return kind.__iter__ is tuple.__iter__ and kind.__len__ is tuple.__len__


def _holds_plain(value: Any) -> bool:
    held: Any = dict.values(value) if isinstance(value, dict) else value
    if isinstance(value, dict) and not all(isinstance(key, str) for key in dict.keys(value)):
        return False  # a registry, which grows with every model that is made
    return len(held) <= _MANY and all(each is not None and type(each) in PLAIN for each in held)
