"""Things with what they held: kept before code runs that could change them, compared, and given back."""

import gc
import os
import random
import sys
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from operator import eq, is_
from types import CellType, MappingProxyType, MemberDescriptorType, WrapperDescriptorType
from typing import Any, NamedTuple

from torch import Tensor, nn

from whence._torch.observe.attribute_reads import NOTHING, has_attributes, is_observable, own_attributes
from whence._torch.observe.generators import is_default_generator
from whence._torch.plain_values import PLAIN
from whence._torch.sizes.plain_answers import as_key
from whence.dependence.values import is_solid

_HOLDING_NONE = PLAIN | {Tensor, nn.Parameter}
"""What tables of modules hold most often, and what is no container."""
Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
CONTAINERS = (dict, list, set, deque)
_OURS = frozenset({"__getattribute__", "__getattr__"})
"""What a capture itself puts on classes while it watches them."""
_LARGEST = 1_000_000
"""Bytes of an array that are copied; of a larger one nobody says whether it has changed."""


@dataclass(frozen=True)
class StateKind:
    """How to read the state of a thing, to compare two of them, and to give one back.

    `look` is how to read it to be compared at once, where that takes no copy.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    same: Callable[[Any, Any], bool]
    look: Callable[[Any], Any] | None = None
    draws: bool = False


class Saved(NamedTuple):
    """A thing with its state then, of which a capture keeps thousands; `path` is how a person calls it."""

    path: str
    thing: Any
    kind: StateKind
    before: Any

    @property
    def is_unchanged(self) -> bool:
        """Whether its state is the same."""
        return self.kind.same(self.before, (self.kind.look or self.kind.read)(self.thing))

    def restore(self) -> None:
        """Give the state back."""
        if not self.is_unchanged:
            self.kind.write(self.thing, self.before)

    def now(self) -> "Saved":
        """The same thing with its present state."""
        return self._replace(before=self.kind.read(self.thing))

    def held(self) -> list[Any]:
        """The values in its state."""
        state = self.before
        return values_of(state) if isinstance(state, dict) or _is_many(state) else [state]

    def with_values(self, exchanged: Callable[[Any], Any]) -> "Saved":
        """The same with other values in the state."""
        state = self.before
        if isinstance(state, dict):
            other: Any = copy(state)
            other.clear()
            other.update({as_key(key): exchanged(value) for key, value in state.items()})
        elif isinstance(state, deque):
            other = deque(map(exchanged, state), state.maxlen)
        elif _is_many(state):
            other = type(state)(map(exchanged, state))
        else:
            other = exchanged(state)
        return self._replace(before=other)

    def entries(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """The places in it that hold something else now: each in words, the dictionary or variable that it is
        in, its key, and what this state has there."""
        if self.kind is VARIABLE:
            yield self.path, self.thing.namespace, self.thing.name, self.before
        elif self.kind is CELL:
            yield self.path, self.thing, None, self.before
        elif self.kind in (ATTRIBUTES, LOCAL, CONTAINER) and isinstance(self.before, dict):
            held = self.thing if self.kind is CONTAINER else own_attributes(self.thing)
            for name, value in self.before.items():
                if dict.get(held, name, NOTHING) is not value:
                    yield f"{self.path}.{name}", held, name, value

    def changed_names(self, *, but_copies: bool = False) -> list[str]:
        """The names, of a thing with names, of what it holds anew; `but_copies` that hold the same."""
        if self.kind not in (ATTRIBUTES, CLASS, SLOTS, LOCAL):
            return [self.path]
        return [f"{self.path}.{name}" for name in self.keys_changed(but_copies=but_copies)]

    def keys_changed(self, *, but_copies: bool = False) -> list[str]:
        """The same names without the path."""
        now = self.kind.read(self.thing)
        return [
            name
            for name in dict.fromkeys((*self.before, *now))
            if self.before.get(name, NOTHING) is not now.get(name, NOTHING)
            and not (but_copies and _is_copy(self.before.get(name), now.get(name)))
        ]


def _is_copy(before: object, now: object) -> bool:
    """Whether an object has taken the place of one of its class that held the same.

    One whose class is not made in Python, such as a tensor, holds more than attributes.
    """
    if type(before) is not type(now) or not all(map(is_observable, type(before).__mro__[:-1])):
        return False
    left, right = map(attributes_and_slots, (before, now))
    return left.keys() == right.keys() and all(_hold_alike(held, right[name]) for name, held in left.items())


def _hold_alike(left: object, right: object) -> bool:
    are_containers = type(left) is type(right) and type(left) in (tuple, *CONTAINERS)
    return left is right or (are_containers and same_items(left, right))


def _is_many(state: object) -> bool:
    return type(state) in (list, tuple, set) or isinstance(state, deque)


@dataclass(frozen=True)
class NamespaceEntry:
    """A name in the namespace of a file."""

    namespace: dict[str, Any]
    name: str


def _set_variable(variable: NamespaceEntry, value: Any) -> None:
    if value is NOTHING:
        variable.namespace.pop(variable.name, None)
    else:
        variable.namespace[variable.name] = value


def _set_cell(cell: CellType, value: Any) -> None:
    if value is NOTHING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def content_of_cell(cell: CellType) -> Any:
    """What a closure's cell holds; `NOTHING` for a name that is bound later."""
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING


def _class(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if name not in _OURS}


def _set_class(kind: type, before: Mapping[str, Any]) -> None:
    now = _class(kind)
    for name in [name for name in now if name not in before]:
        delattr(kind, name)
    for name, value in before.items():
        if now.get(name, NOTHING) is not value:
            setattr(kind, name, value)


def slots_of(kind: type) -> list[tuple[str, MemberDescriptorType]]:
    """Where instances of a class keep what is in no dictionary."""
    rows = (row for base in kind.__mro__ if "__slots__" in vars(base) for row in vars(base).items())
    return [(name, held) for name, held in rows if type(held) is MemberDescriptorType]


def content_of_slot(slot: Any, thing: Any) -> Any:
    """What is in a slot; `NOTHING` where nothing is yet."""
    try:
        return slot.__get__(thing)
    except AttributeError:
        return NOTHING


def content_of_slots(thing: Any) -> dict[str, Any]:
    """What an instance keeps outside a dictionary, by name."""
    rows = [(name, content_of_slot(slot, thing)) for name, slot in slots_of(type(thing))]
    return {name: held for name, held in rows if held is not NOTHING}


def attributes_and_slots(thing: object) -> Mapping[str, Any]:
    """What a thing holds itself, in a dictionary and outside of one: the dictionary where that is all."""
    slots = content_of_slots(thing)
    return {**own_attributes(thing), **slots} if slots else own_attributes(thing)


def _set_slots(thing: Any, before: Mapping[str, Any]) -> None:
    for name, slot in slots_of(type(thing)):
        if name in before:
            slot.__set__(thing, before[name])
        elif content_of_slot(slot, thing) is not NOTHING:
            slot.__delete__(thing)


def _cached_calls(function: Any) -> tuple[int, int]:
    known = function.cache_info()
    return known.misses, known.currsize


def _set_environment(environ: Any, before: Mapping[str, str]) -> None:
    for name in [name for name in environ if name not in before]:
        del environ[name]
    for name, value in before.items():
        if environ.get(name) != value:
            environ[name] = value


def _context(variable: ContextVar[Any]) -> Any:
    return variable.get(NOTHING)


def _set_context(variable: ContextVar[Any], before: Any) -> None:
    if before is not NOTHING:  # one that had no value cannot be without one again: it is refused
        variable.set(before)


def _bit_state(generator: Any) -> Any:
    """The state of a generator of NumPy's, new or old."""
    inside = getattr(generator, "bit_generator", None)
    return inside.state if inside is not None else generator.get_state(legacy=False)


def _set_bit_state(generator: Any, state: Any) -> None:
    if (inside := getattr(generator, "bit_generator", None)) is not None:
        inside.state = state
    else:
        generator.set_state(state)


def _same_bits(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same_bits(left[key], right[key]) for key in left)
    return left.tobytes() == right.tobytes() if hasattr(left, "tobytes") else bool(left == right)


def _array(thing: Any) -> Any:
    return thing.copy() if thing.nbytes <= _LARGEST and not thing.dtype.hasobject else None


def _set_array(thing: Any, before: Any) -> None:
    thing[...] = before


def _same_array(left: Any, right: Any) -> bool:
    return left is None or right is None or left.tobytes() == right.tobytes()


def _reset(now: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Give a dictionary its items back, in order.

    Another thread may be looking: what was there and still is, is there all the time.
    """
    for name in _new_names(now, before):
        now.pop(name, None)
    for name, value in before.items():  # `update` of a Counter would add
        now[name] = value
    if not _same_keys(now, before):
        for name, value in before.items():
            now.pop(name, None)
            now[name] = value


def _new_names(now: dict[Any, Any], before: Mapping[Any, Any]) -> list[Any]:
    try:
        return [name for name in now if name not in before]
    except TypeError:  # a size was a key, which symbols are while a model runs, and then no longer
        now.clear()
        return []


def same_items(left: Any, right: Any) -> bool:
    """Whether two containers hold the same objects, in the same order where there is one."""
    if type(left) is dict is type(right) and len(left) == len(right) and all(map(is_, left, right)):
        return all(map(is_, left.values(), right.values()))  # most are such
    if isinstance(left, set | bytearray | array) or isinstance(right, set):
        return bool(left == right)
    if len(left) != len(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return _same_keys(left, right) and all(map(is_, left.values(), right.values()))
    return all(map(is_, left, right))


def _same_keys(left: Any, right: Any) -> bool:
    """Whether keys are the same, in order; tensors are not to be asked whether they are equal."""
    return all(map(is_, left, right)) or (
        list(left) == list(right) if not any(isinstance(key, Tensor) for key in (*left, *right)) else False
    )


def _refill_container(held: Any, kept: Any) -> None:
    """Give a container back what it held."""
    if isinstance(held, dict) and isinstance(kept, dict):
        _reset(held, kept)
    elif isinstance(held, list | bytearray | array):
        held[:] = kept
    elif isinstance(held, deque):
        held.clear()
        held.extend(kept)
    else:
        held.clear()
        held.update(kept)


def _copy_of_container(held: Any) -> Any:
    """A copy of a container, made by no code of its class."""
    if type(held) in (dict, list, set):
        return held.copy()
    if isinstance(held, dict):
        return dict(OrderedDict.items(held) if isinstance(held, OrderedDict) else dict.items(held))
    if isinstance(held, deque):
        return deque(held, held.maxlen)
    return set(held) if isinstance(held, set) else list(held) if isinstance(held, list) else held[:]


def _looked_at(held: Any) -> Any:
    return held if type(held) in _STANDARD else _copy_of_container(held)


VARIABLE = StateKind(lambda it: it.namespace.get(it.name, NOTHING), _set_variable, is_)
CELL = StateKind(content_of_cell, _set_cell, is_)
CONTAINER = StateKind(_copy_of_container, _refill_container, same_items, _looked_at)
ATTRIBUTES = StateKind(
    lambda thing: dict(own_attributes(thing)),
    lambda thing, before: _reset(own_attributes(thing), before),
    same_items,
    own_attributes,
)
LOCAL = StateKind(
    lambda thing: dict(thing.__dict__), lambda thing, before: _reset(thing.__dict__, before), same_items
)
SLOTS = StateKind(content_of_slots, _set_slots, same_items)
CLASS = StateKind(_class, _set_class, same_items)
CACHED = StateKind(_cached_calls, lambda function, _: function.cache_clear(), eq)
ENVIRONMENT = StateKind(dict, _set_environment, eq)
CONTEXT = StateKind(_context, _set_context, is_)
PYTHON_RANDOM = StateKind(random.Random.getstate, random.Random.setstate, eq, draws=True)
NUMPY_RANDOM = StateKind(_bit_state, _set_bit_state, _same_bits, draws=True)
ARRAY = StateKind(_array, _set_array, _same_array)


_OF_TYPE = {CellType: CELL, NamespaceEntry: VARIABLE, ContextVar: CONTEXT, type(os.environ): ENVIRONMENT}


def kinds_of(thing: Any) -> Iterator[StateKind]:
    """What state a thing has; nothing for what has none, or none that anybody can look at.

    The default generators of Python and NumPy are watched by themselves.
    """
    kind = type(thing)
    if is_default_generator(thing):
        return
    if kind in _OF_TYPE:
        yield _OF_TYPE[kind]
    elif issubclass(kind, type):
        yield CLASS
    elif issubclass(kind, random.Random):
        yield from [] if issubclass(kind, random.SystemRandom) else [PYTHON_RANDOM]
    elif issubclass(kind, threading.local):
        yield LOCAL
    elif kind.__module__.startswith("numpy"):
        numpy = sys.modules["numpy"]
        if isinstance(thing, numpy.random.Generator | numpy.random.RandomState):
            yield NUMPY_RANDOM
        elif isinstance(thing, numpy.ndarray):
            yield ARRAY
    else:
        yield from _kinds_of_object(thing)


def _kinds_of_object(thing: Any) -> Iterator[StateKind]:
    kind = type(thing)
    if is_container(kind):
        yield CONTAINER
    if kind is _lru_cache_wrapper:
        yield CACHED
    if kind is not MappingProxyType and has_attributes(thing):
        yield ATTRIBUTES
    if slots_of(kind):
        yield SLOTS


_CONTAINERS = (*CONTAINERS, bytearray, array)
_STANDARD = (*_CONTAINERS, OrderedDict, defaultdict, Counter)
_OWN_WAYS = ("__iter__", "__len__", "__getitem__", "keys", "values", "items", "update", "pop", "clear")


def is_container(kind: type) -> bool:
    """Whether a class is a container, and goes about it as Python's own does."""
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    if base is None or kind in _STANDARD:
        return base is not None
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in _OWN_WAYS)


def is_iterator(thing: Any) -> bool:
    """Whether a thing is an iterator written in C, but no file: what is taken from it cannot be put back."""
    kind = type(thing)
    return type(getattr(kind, "__next__", None)) is WrapperDescriptorType and kind.__module__ != "_io"


def save(path: str, thing: Any) -> list[Saved]:
    """A thing with its state."""
    return [Saved(path, thing, kind, kind.read(thing)) for kind in kinds_of(thing)]


def containers_saved(
    rows: Iterable[tuple[str, Container]], *, keyed: bool = False, but: type | tuple[()] = ()
) -> list[Saved]:
    """Containers, and those inside each under its path, to which keys are added where that is asked for;
    `but` for those that nobody may look into."""
    found, seen, waiting = list[Saved](), set[int](), list(rows)
    while waiting:
        path, held = waiting.pop()
        if id(held) not in seen:
            seen.add(id(held))
            found.append(Saved(path, held, CONTAINER, content := _copy_of_container(held)))
            kinds = set(map(type, values_of(content)))
            if not kinds <= _HOLDING_NONE and any(issubclass(kind, CONTAINERS) for kind in kinds):
                inside = _containers_in(path, content, keyed=keyed)
                waiting += [row for row in inside if not issubclass(type(row[1]), but)]
    return found


def _containers_in(path: str, held: Container, *, keyed: bool) -> list[tuple[str, Container]]:
    keys = held if isinstance(held, dict) else range(len(held))
    return [
        (f"{path}[{spelled_key(key, at)}]" if keyed else path, value)
        for at, (key, value) in enumerate(zip(keys, values_of(held), strict=True))
        if issubclass(type(value), CONTAINERS)
    ]


def spelled_key(key: object, position: int) -> str:
    """How a person reads a key; one that is no plain value is called by its class and where it stands."""
    return repr(key) if is_solid(key) else f"{type(key).__name__} {position}"


def save_all(path: str, thing: Any) -> list[Saved]:
    """A container with those inside it; or an object with its attributes, and the containers among them."""
    if isinstance(thing, CONTAINERS):
        return containers_saved([(path, thing)], keyed=True)
    rows = [Saved(path, thing, ATTRIBUTES, dict(own_attributes(thing)))]
    rows += [Saved(path, thing, SLOTS, slots)] if (slots := content_of_slots(thing)) else []
    pairs = (pair for row in rows for pair in row.before.items())
    held = [(f"{path}.{name}", value) for name, value in pairs if isinstance(value, CONTAINERS)]
    return [*rows, *containers_saved(held, keyed=True)]


def way_back(kept: Iterable[Any]) -> Callable[[], None]:
    """A way back to what was kept; looked through only when it is gone, so it may grow until then."""

    def restore() -> None:
        for each in kept:
            each.restore()

    return restore


def values_of(held: Any) -> list[Any]:
    """What a container holds, a dictionary of a class of its own too: that may make values when asked."""
    return list(dict.values(held) if isinstance(held, dict) else held)


def results_kept(function: Any, kind: type) -> Iterator[Any]:
    """What a function that caches its calls keeps of a class: itself, or in a container."""
    waiting, seen = gc.get_referents(function), set[int]()
    while waiting:
        thing = waiting.pop()
        if type(thing) is kind:
            yield thing
        elif id(thing) not in seen and type(thing) in (dict, list, tuple, set):
            seen.add(id(thing))
            waiting += gc.get_referents(thing)
