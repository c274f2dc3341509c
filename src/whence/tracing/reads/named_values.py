"""What code names outside of itself: values that may decide, each with the way to where the code finds it.

Of what variables lead to, only what code spells is looked at: attributes by its names, entries by its
constants, and of an object what those of its methods spell that the code may call.
"""

import os
import sys
from collections import ChainMap, Counter, UserDict, defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial, partialmethod
from operator import attrgetter, itemgetter, methodcaller
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from whence._torch.files import WHENCE
from whence._torch.observe.attribute_reads import NOTHING, class_attribute, has_attributes
from whence._torch.plain_values import PLAIN, PLAIN_IN_WHOLE, same_constant
from whence.dependence.code import (
    defaults_of,
    environment_names,
    function_in,
    globals_within,
    imported,
    is_of_named_tuple,
)
from whence.dependence.snapshots import Saved, content_of_cell, save
from whence.dependence.values import content_of, is_constant
from whence.program.arguments.optimizer_arguments import Outside
from whence.provenance import Source
from whence.tracing.reads.code_words import CodeWords
from whence.tracing.reads.held_values import (
    CALLING,
    HOLDING,
    IMPLIED,
    MANY,
    MAPPINGS,
    OF_CLASSES,
    SEQUENCES,
    default_of,
    goes_as_pythons,
    is_entered_by_name,
    is_looked_into,
    is_of_run,
    methods_called,
    methods_of,
    says_what_it_is,
    values_held,
)
from whence.tracing.reads.outside.modules import children_of, facts_of
from whence.tracing.reads.type_queries import is_answer

_NOT_ENTERED = (*PLAIN_IN_WHOLE, Tensor, CodeType, torch.Generator)
_ACCUMULATING = (defaultdict, Counter)
_LEADING = (type, ref, FunctionType, MappingProxyType, ModuleType, BaseException)
"""What an attribute may hold that decides by what it leads to."""
_HANDED_ON = (SimpleNamespace, BaseException, ModuleType, type, ChainMap, UserDict)
"""What nobody sees being read of, so that a function which is given one counts for what it spells."""
_DESCRIBING = (*(MethodWrapperType, GetSetDescriptorType, MemberDescriptorType),)
_LOOKED_INTO = (
    *(nn.Module, BaseException, ContextVar, CodeType, BuiltinFunctionType, type, ref, ModuleType),
    *(*HOLDING, *SEQUENCES, *MAPPINGS, *OF_CLASSES, *CALLING, *_DESCRIBING, Enum),
)
_LARGE = 1024
"""How many numbers and texts are compared of a table that is asked under keys which are computed."""
FAR = 6
"""How many steps a value is followed from a variable."""


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
        self._met: dict[int, tuple[Outside, Source | None]] = {}

    def add(self, found: Outside, source: Source | None) -> None:
        """Note a value, whatever it is."""
        held = found.value
        self.rows.append(NamedRow(found, source, save(found.path, held) if isinstance(held, HOLDING) else []))

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

    def given(self, frame: FrameType, kinds: tuple[type, ...] = _HANDED_ON) -> list[Any]:
        """A function begins, and reads what it spells of these of its arguments."""
        found = [value for value in _arguments(frame) if issubclass(type(value), kinds)]
        for value in found:
            if id(value) in self._met:
                self.walk(*self._met[id(value)], CodeWords.of(frame.f_code))
        return found

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
        if issubclass(type(value), _HANDED_ON):
            self._met.setdefault(id(value), (found, source))
        if issubclass(type(value), nn.Module) and not self._is_inside(value):
            self._module(found, source, spelling)
        is_whole = is_plain(value) or _is_asked_for_any(value, spelling)
        if is_whole or (found.way and self._says_what_it_is(value)) or self._stands_alone(found):
            self._note(found, source)
        elif found.way and self._is_thing(value):
            self._note(replace(found, is_thing=True), source)
            self._watch(found)
        elif found.way and self._is_opaque(value):
            self._note(found, source)
        ends_here = is_whole and not issubclass(type(value), Enum)  # whose members may hold more than a value
        if ends_here or not left or not self._is_entered(value):
            return
        if self._is_new((*self._key_to_enter(found), spelling), value):
            spelling = self._spelled_of(value, spelling)
            for part in self._parts(found, spelling):
                self.walk(part, source, spelling, left - 1)

    def _module(self, found: Outside, source: Source | None, spelling: CodeWords) -> None:
        """Note a module that the model does not hold, and those inside it, however deep they lie."""
        if not self._is_new(("module", *self._key_to_enter(found)), found.value):
            return
        self._watch(found)
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
        elif is_entered_by_name(type(value)):
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
        return says_what_it_is(value)

    def _is_thing(self, value: object) -> bool:
        """Whether a value is an object, of which other rows say what it holds."""
        return (
            self._is_entered(value) and is_entered_by_name(type(value)) and not issubclass(type(value), type)
        )

    def _watch(self, found: Outside) -> None:
        """An object was met, of which somebody may see what is read."""

    def _is_opaque(self, value: object) -> bool:
        """Whether a value is an object of C, into which nobody can look: another one decides otherwise. Its
        class has a name, which a file can tell."""
        kind = type(value)
        if issubclass(kind, _LOOKED_INTO) or has_attributes(value):
            return False
        return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind

    def _key_to_enter(self, found: Outside) -> tuple[object, ...]:
        return (id(found.value),)

    def _key_to_note(self, found: Outside) -> tuple[object, ...]:
        value = found.value
        return ("held", id(value)) if isinstance(value, HOLDING) else (id(found.root), found.path)

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
        yield from values_held(found, spelling)
        if isinstance(found.value, dict):
            yield from self._registered(found)

    def _registered(self, found: Outside) -> Iterator[Outside]:
        """What a registry has under keys that are the model's, or lead there weakly."""
        for key, value in list(dict.items(found.value)):
            thing = key() if isinstance(key, ref) else key
            if type(thing) not in PLAIN and self._is_inside(thing):
                path = f"{found.path}[{type(thing).__name__}]"
                yield Outside(path, found.root, (*found.way, itemgetter(key)), value)

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
    code, variables = function.__code__, {} if is_of_named_tuple(function) else function.__globals__
    for name in sorted(globals_within(code) & variables.keys()):
        yield Outside(f"global {name}", variables, (itemgetter(name),), variables[name])
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and (held := content_of_cell(cell)) is not NOTHING:
            yield Outside(f"closure {name}", cell, (attrgetter("cell_contents"),), held)


def _arguments(frame: FrameType) -> Iterator[Any]:
    """What a function was called with that begins; where it takes any number, each of those."""
    for value in frame.f_locals.values():
        kind = type(value)
        yield from value if kind is tuple else value.values() if kind is dict else (value,)


def _is_ours(value: object) -> bool:
    """Whether it is there for the run alone: what stands for `type`, or a function of ours in the place of
    one that is watched."""
    is_function = type(value) is FunctionType and value.__code__.co_filename.startswith(WHENCE)
    return is_function or is_answer(value)


def _with_methods(kind: type, spelling: CodeWords) -> CodeWords:
    meta: type = type(kind)
    bases = (*kind.__mro__, *meta.__mro__)
    written = [base for base in bases if is_looked_into(base)]
    waiting = {name: held for base in reversed(written) for name, held in vars(base).items()}
    called = [name for name in waiting if name in IMPLIED or name in spelling.names]
    while called:
        for name in called:
            held = waiting.pop(name)
            if (function := _function_behind(held) or function_in(held)) is not None:
                spelling = spelling.with_(CodeWords.of(function.__code__))
        called = [name for name in waiting if name in spelling.names]
    return spelling


def _function_behind(value: Any) -> FunctionType | None:
    """The function that a method is, or that is called with what else there is."""
    if isinstance(value, MethodType | partialmethod):
        return function_in(value.__func__ if isinstance(value, MethodType) else value.func)
    return None


def is_plain(value: object) -> bool:
    """Whether a value decides by what it is: numbers, texts, flags, tensors, arrays, and small containers.

    None is what is replaced by whoever comes first; what a run fills itself is left out afterwards.
    """
    if isinstance(value, Tensor):
        return True
    kind = type(value)
    if issubclass(kind, HOLDING):
        if kind not in HOLDING and (issubclass(kind, _ACCUMULATING) or not goes_as_pythons(kind)):
            return False
        return _holds_plain(value)
    if value is None or issubclass(kind, (ModuleType, type)):
        return False
    return is_constant(value) or content_of(value) is not None


def _holds_plain(value: Any, most: int = MANY) -> bool:
    held: Any = dict.values(value) if isinstance(value, dict) else value
    if isinstance(value, dict) and not all(isinstance(key, str) for key in dict.keys(value)):
        return False  # a registry, which grows with every model that is made
    return len(held) <= most and all(each is not None and type(each) in PLAIN for each in held)


def _is_asked_for_any(value: object, spelling: CodeWords) -> bool:
    """Whether a value is a table of numbers and texts of which code spells no key, and may ask for each."""
    if type(value) is not dict or len(value) <= MANY or not spelling.keys.isdisjoint(value):
        return False
    return _holds_plain(value, _LARGE)
