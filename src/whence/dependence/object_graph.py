"""Everything that Python code can reach from a variable, with what each thing held when it was reached.

Nobody sees objects outside the model being read or changed. So all that can be reached is looked at before
code runs that could use it, and looked at again before the record of that run stands for another call.
"""

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import _lru_cache_wrapper, partial
from itertools import chain
from operator import attrgetter, eq, is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
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
    SimpleNamespace,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

from torch import Tensor, nn

from whence._torch.observe.attribute_reads import NOTHING, has_attributes, is_observable
from whence._torch.plain_values import PLAIN_IN_WHOLE
from whence.dependence.code import FORBIDDEN
from whence.dependence.snapshots import content_of_cell, content_of_slots

_MOST = 4000
"""How many things may be reached, before comparing them costs more than running the code."""
_ATOMS = PLAIN_IN_WHOLE | {
    *(NotImplementedType, object, ModuleType, GenericAlias, UnionType, MethodDescriptorType),
    *(WrapperDescriptorType, MethodWrapperType, GetSetDescriptorType, MemberDescriptorType),
}
_STEADY_PACKAGES = frozenset(
    {
        *("torch", "typing", "logging", "re", "functools", "_functools", "operator", "_operator", "abc"),
        *("_abc", "inspect", "enum", "dataclasses", "contextlib", "string", "math", "builtins"),
    }
)
"""Packages whose objects do not change what a model computes; a caching function answers as it did."""
_CHANGING = "torch.distributions"
_OURS = frozenset({"__getattribute__", "__getattr__"})
"""What a capture itself puts on classes while it watches them."""


class ReachedThing(NamedTuple):
    """A thing, with what it held."""

    thing: Any
    parts: tuple[Any, ...]

    @property
    def is_unchanged(self) -> bool:
        """Whether it holds the same."""
        now = parts_of(self.thing)
        return len(now) == len(self.parts) and all(map(is_, now, self.parts))


@dataclass
class Reached:
    """All that was reached, by identity, and the first thing whose changes nobody can see."""

    is_watched: Callable[[Any], bool]
    held: dict[int, ReachedThing] = field(default_factory=dict)
    others: dict[int, Any] = field(default_factory=dict)
    doubt: str = ""
    _glance: "_Glance | None" = None

    def add(self, value: Any, name: str) -> None:
        """Look at a value and at everything that can be reached from it."""
        self._glance = None
        waiting = [value]
        while waiting and not self.doubt:
            thing = waiting.pop()
            if type(thing) in _ATOMS or id(thing) in self.held or id(thing) in self.others:
                continue
            if id(thing) in FORBIDDEN:
                self.doubt = f"{name} may be {thing.__name__}()"
                return
            if isinstance(thing, Tensor) or self.is_watched(thing) or is_steady(thing):
                self.others[id(thing)] = thing
                continue
            if not can_be_compared(thing):
                self.doubt = f"it may use {name}, a {type(thing).__name__}, whose changes nobody sees"
                return
            parts = parts_of(thing)
            self.held[id(thing)] = ReachedThing(thing, parts)
            waiting += _followed(thing, parts)
            if len(self.held) > _MOST:
                self.doubt = f"{name} leads to more than {_MOST} things that may change"

    def include(self, other: "Reached") -> None:
        """Add what another call reached."""
        self.held = {**other.held, **self.held}
        self.others |= other.others
        self.doubt = self.doubt or other.doubt
        self._glance = None

    def changed(self) -> list[ReachedThing]:
        """Everything that holds something else now."""
        if self._glance is not None and self._glance.is_unchanged():
            return []
        found = [held for held in self.held.values() if not held.is_unchanged]
        self._glance = None if found else _Glance.at(self.held.values())
        return found

    def __contains__(self, thing: object) -> bool:
        return id(thing) in self.held or id(thing) in self.others


@dataclass(frozen=True, slots=True)
class _Glance:
    """Everything at once, as fast as can be: this is asked for every call that is replayed.

    What there are many of is looked at together; `others` are what is left.
    """

    lists: tuple[list[Any], ...]
    tables: tuple[Mapping[Any, Any], ...]
    functions: tuple[FunctionType, ...]
    others: tuple[ReachedThing, ...]
    parts: tuple[Any, ...]
    lengths: tuple[int, ...]

    @classmethod
    def at(cls, held: Iterable[ReachedThing]) -> "_Glance":
        """A glance at things, all of which hold now what they held."""
        by_kind: dict[str, list[Any]] = {"list": [], "table": [], "function": [], "other": []}
        for each in held:
            kind = _TOGETHER.get(type(each.thing), "other")
            if kind != "immutable":
                by_kind[kind].append(each if kind == "other" else each.thing)
        lists, tables, functions, others = map(tuple, by_kind.values())
        classes = (vars(each.thing) for each in others if isinstance(each.thing, type))
        namespaces = (function.__dict__ for function in functions)
        others = tuple(each for each in others if not isinstance(each.thing, type))
        found = cls(lists, (*tables, *classes, *namespaces), functions, others, (), ())
        return replace(found, parts=tuple(found._now()), lengths=tuple(found._lengths()))

    def _now(self) -> Iterator[Any]:
        keys = chain.from_iterable(self.tables)
        values = chain.from_iterable([each.values() for each in self.tables])
        return chain(*self.lists, keys, values, *map(_MADE_OF, self.functions))

    def _lengths(self) -> Iterator[int]:
        return map(len, chain(self.lists, self.tables))

    def is_unchanged(self) -> bool:
        """Whether everything holds the same."""
        return (
            all(map(eq, self._lengths(), self.lengths))
            and all(map(is_, self._now(), self.parts))
            and all(held.is_unchanged for held in self.others)
        )


_MADE_OF = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_TOGETHER: dict[type, str] = {
    **{list: "list", dict: "table", OrderedDict: "table", defaultdict: "table", FunctionType: "function"},
    **dict.fromkeys((tuple, frozenset, BuiltinFunctionType), "immutable"),
}


def is_steady(thing: Any) -> bool:
    """Whether a thing does not change, or decides nothing that a model computes."""
    if isinstance(thing, type):
        package = _package_of(thing)
        return not is_observable(thing) or package in _STEADY_PACKAGES or package in sys.stdlib_module_names
    if isinstance(thing, FunctionType):
        return _package_of(thing) in _STEADY_PACKAGES
    if isinstance(thing, BuiltinFunctionType):
        return isinstance(thing.__self__, ModuleType | type | None)
    if isinstance(thing, (*_COMPARED, SimpleNamespace, Enum)):
        return False
    kind = type(thing)
    return _package_of(kind) in _STEADY_PACKAGES - {"builtins"} and not kind.__module__.startswith(_CHANGING)


def _package_of(thing: Any) -> str:
    return str(thing.__module__ or "builtins").partition(".")[0]


_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)
_WRAPPERS = (MethodType, partial, classmethod, staticmethod, property, CellType)
_COMPARED = (
    *_CONTAINERS,
    *_WRAPPERS,
    FunctionType,
    BuiltinFunctionType,
    ContextVar,
    nn.Module,
    _lru_cache_wrapper,
)


def can_be_compared(thing: Any) -> bool:
    """Whether what a thing holds can be looked at."""
    return isinstance(thing, (*_COMPARED, type)) or _has_attributes(thing)


def _has_attributes(thing: Any) -> bool:
    kind = type(thing)
    return (
        isinstance(thing, nn.Module | SimpleNamespace)
        or is_observable(kind)
        or kind.__module__.startswith(_CHANGING)
    )


def parts_of(thing: Any) -> tuple[Any, ...]:
    """What a thing holds, looked at without asking it."""
    own = _parts_of_kind(thing)
    if isinstance(thing, type) or not _has_attributes(thing):
        return own
    return (*own, *_attributes(thing))


def _of_function(thing: Any) -> tuple[Any, ...]:
    names = thing.__dict__
    return (thing.__code__, thing.__defaults__, thing.__kwdefaults__, *names, *names.values())


def _parts_of_kind(thing: Any) -> tuple[Any, ...]:
    match thing:
        case dict() | MappingProxyType():
            return (*thing.keys(), *thing.values())
        case list() | tuple() | set() | frozenset() | deque():
            return tuple(thing)
        case type():
            return tuple(held for name, held in vars(thing).items() if name not in _OURS)
        case FunctionType():
            return _of_function(thing)
        case partial():
            return (thing.func, thing.args, *thing.keywords, *thing.keywords.values())
        case BuiltinFunctionType():
            return (thing.__self__,)
        case MethodType():
            return (thing.__func__, thing.__self__)
        case classmethod() | staticmethod():
            return (thing.__func__,)
        case property():
            return (thing.fget,)
        case CellType():
            return (content_of_cell(thing),)
        case ContextVar():
            return (thing.get(NOTHING),)
        case _lru_cache_wrapper():
            known = thing.cache_info()
            return (thing.__wrapped__, known.misses, known.currsize)
    return ()


def _attributes(thing: Any) -> tuple[Any, ...]:
    slots = content_of_slots(thing)
    own = vars(thing) if has_attributes(thing) else {}
    return (*own, *own.values(), *slots, *slots.values())


def _followed(thing: Any, parts: tuple[Any, ...]) -> Iterator[Any]:
    """What of a thing's parts to look at, too. What a function closes over is looked at where it runs."""
    if isinstance(thing, type):
        yield from (kind for kind in (type(thing), *thing.__mro__[1:]) if is_observable(kind))
        yield from (part for part in map(_behind, parts) if not isinstance(part, property))
    elif isinstance(thing, FunctionType):
        yield from (part for part in parts if not isinstance(part, FunctionType | CodeType))
    else:
        yield from parts
        if is_observable(type(thing)):
            yield type(thing)


def _behind(part: Any) -> Any:
    """The function of a method; nothing for one that holds nothing that could change."""
    function = part.__func__ if isinstance(part, classmethod | staticmethod) else part
    if not isinstance(function, FunctionType):
        return part
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    attributes = (held for held in vars(function).values() if not isinstance(held, FunctionType))
    return function if any(type(held) not in _ATOMS for held in (*defaults, *attributes)) else None
