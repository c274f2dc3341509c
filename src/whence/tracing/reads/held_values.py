"""What a value holds that code may ask for: attributes by the names that it spells, entries by its constants.

Of an object it is what those of its methods spell that the code may call.
"""

import gc
import threading
from argparse import Namespace
from collections import ChainMap, Counter, OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import is_dataclass
from enum import Enum
from functools import _lru_cache_wrapper, partial, partialmethod
from itertools import islice
from operator import itemgetter, methodcaller
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from torch import Tensor, dtype, nn

from whence._torch.fakes import FakeTensor
from whence._torch.files import is_library
from whence._torch.observe.attribute_reads import (
    NOTHING,
    class_attribute,
    holds_settings,
    is_observable,
    own_attributes,
)
from whence._torch.plain_values import PLAIN
from whence.dependence.code import behind, defaults_of, function_in
from whence.dependence.describe import HELD_BY_CLASSES, METHODS_OF_C
from whence.dependence.lookup import static_attribute
from whence.dependence.snapshots import is_container
from whence.dependence.values import is_literal
from whence.program.arguments.optimizer_arguments import Outside
from whence.tracing.reads.code_words import FOR_ALL, CodeWords
from whence.tracing.reads.type_queries import StandIn

Step = Callable[[Any], Any]
HOLDING = (list, tuple, dict, set, frozenset)
SEQUENCES = (list, tuple, deque)
_WEAK = (WeakKeyDictionary, WeakValueDictionary)
MAPPINGS = (dict, MappingProxyType, ChainMap, UserDict)
OF_CLASSES = (FunctionType, *HELD_BY_CLASSES, *METHODS_OF_C)
CALLING = (MethodType, partial, partialmethod, _lru_cache_wrapper, ref)
_OPERATIONS = (
    *("neg", "pos", "abs", "invert", "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
IMPLIED = frozenset(
    (
        *("__call__", "__enter__", "__exit__", "__iter__", "__next__", "__getitem__", "__getattr__"),
        *("__len__", "__contains__", "__bool__", "__float__", "__int__", "__index__", "__get__", "__eq__"),
        *("__lt__", "__le__", "__gt__", "__ge__", "__ne__", "__hash__", "__missing__", "forward", "backward"),
        *(f"__{operation}__" for operation in _OPERATIONS),
        *(f"__{side}{operation}__" for operation in _OPERATIONS[4:] for side in "ri"),
    )
)
"""Methods that code calls without naming them."""
_ANSWERING = frozenset({"__getattr__"})
_WITH_STATE = frozenset({"threading", "queue"})
"""Modules of Python's whose objects hold what people put there."""
_WITH_SETTINGS = (SimpleNamespace, Namespace, BaseException, threading.local)
"""Classes of Python's in whose objects people put what they like."""
_ASKING = (dict.__getitem__, OrderedDict.__getitem__, Counter.__getitem__)
MANY = 64
"""How many entries are looked into."""


def values_held(found: Outside, spelling: CodeWords) -> Iterator[Outside]:
    """What a value holds that code may ask for."""
    value, kind = found.value, type(found.value)
    if issubclass(kind, ModuleType):
        names = () if is_library(value.__name__) else spelled_in(vars(value), spelling.names)
        yield from (of_module(found, name) for name in names)
    elif issubclass(kind, type):
        yield from _of_class(value, spelling)
    elif isinstance(value, CALLING):
        for position, part in enumerate(_things_behind(value)):
            step = partial(part_behind, position=position)
            path = f"{found.path}{_access_behind(value, position)}"
            yield Outside(path, found.root, (*found.way, step), part)
        result = result_alone(value)
        if result is not NOTHING and type(result) not in PLAIN:  # which never changes
            yield Outside(f"{found.path}()", found.root, (*found.way, result_alone), result)
    elif issubclass(kind, OF_CLASSES):
        yield from _of_function(found, spelling)
    elif issubclass(kind, ContextVar):
        yield of_context(value)
    elif issubclass(kind, Enum):
        yield from _of_member(value, spelling)
    elif issubclass(kind, _WEAK):
        yield attribute_of(found, "data", value.data)
    else:
        if goes_as_pythons(kind) or issubclass(kind, MAPPINGS):
            yield from _entries(found, spelling)
        if is_entered_by_name(kind):
            yield from _of_object(found, spelling)


def result_alone(function: Any) -> Any:
    """What a function that caches its calls, and takes no arguments, keeps of its call; it is not called.

    `NOTHING` where it was not called yet, and for any other function.
    """
    if not isinstance(function, _lru_cache_wrapper) or function.cache_info().currsize != 1:
        return NOTHING
    held = gc.get_referents(function)
    place = next((at for at, each in enumerate(held) if each is function.__wrapped__), 0)
    cache: Any = held[place - 1] if place else {}
    if not isinstance(cache, dict) or len(cache) != 1:
        return NOTHING
    ((key, result),) = cache.items()
    if key != ():
        return NOTHING
    if function.cache_parameters()["maxsize"] is None:
        return result
    others = [each for each in held[: place - 1] if each is not key and not isinstance(each, type)]
    return others[0] if len(others) == 1 else NOTHING


def of_context(variable: ContextVar[Any]) -> Outside:
    """What a context variable gives, its default too."""
    path = f"context variable {variable.name}"
    return as_found(path, variable, methodcaller("get"))


def as_found(path: str, root: Any, step: Step) -> Outside:
    """What is one step away from something, as it is now."""
    now = Outside(path, root, (step,), None).now()
    return Outside(path, root, (step,), now)


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


_COVERABLE = (FunctionType, staticmethod, classmethod)
"""What classes hold, and an object may have one of its own in the place of."""


def is_computed(held: object) -> bool:
    """Whether what a class holds computes an attribute, in whose place no object can have its own."""
    return isinstance(held, OF_CLASSES) and type(held) not in _COVERABLE


def _of_object(found: Outside, spelling: CodeWords) -> Iterator[Outside]:
    """Attributes of an object, and the methods of its class."""
    for name in sorted(spelling.names):
        held = static_attribute(found.value, name)
        is_of_class = own_attributes(found.value).get(name) is not held
        if is_of_class and is_computed(held):
            continue
        if held is not NOTHING or name in spelling.asked:
            yield attribute_of(found, name, held)
    yield from methods_called(type(found.value), spelling)


def implied_methods(kind: type) -> Iterator[FunctionType]:
    """The functions of a class of the user's, and no module's, that code calls without naming them."""
    written = () if issubclass(kind, nn.Module) else filter(is_looked_into, kind.__mro__)
    held = (vars(base)[name] for base in written for name in sorted(vars(base).keys() & IMPLIED))
    return (function for each in held if (function := function_in(each)) is not None)


def methods_called(kind: type, spelling: CodeWords) -> Iterator[Outside]:
    """What code calls of the instances of a class; modules are looked at elsewhere."""
    return iter(()) if issubclass(kind, nn.Module) else methods_of(kind, spelling)


def methods_of(kind: type, spelling: CodeWords) -> Iterator[Outside]:
    """What code calls of the instances of a class, where it or a base of it is the user's."""
    written = [base for base in kind.__mro__ if is_observable(base) and not is_library(base.__module__)]
    for base in written:
        for name in sorted(vars(base).keys() & (IMPLIED | spelling.names)):
            if isinstance(held := vars(base)[name], OF_CLASSES):
                yield of_class(base, name, held)


def spelled_in(variables: dict[str, Any], names: frozenset[str]) -> list[str]:
    """The variables of a file that code spells, and what answers for those that are not there."""
    return sorted(variables.keys() & (names | _ANSWERING))


def of_module(found: Outside, name: str) -> Outside:
    """A variable of a file; of the one that is there then, where code comes to it by a name."""
    variables = vars(found.value)
    if not found.way:
        return Outside(f"global {name}", variables, (itemgetter(name),), variables[name])
    way: tuple[Step, ...] = (*found.way, partial(static_attribute, name=name))
    return Outside(f"global {found.value.__name__}.{name}", found.root, way, variables[name])


def is_entered_by_name(kind: type) -> bool:
    """Whether objects of a class are a user's, or what Python and PyTorch have for settings and data."""
    return issubclass(kind, _WITH_SETTINGS) or is_looked_into(kind)


def is_looked_into(kind: type) -> bool:
    if not is_observable(kind):
        return holds_settings(kind)
    return not is_library(kind.__module__) or kind.__module__ in _WITH_STATE


def _of_member(member: Enum, spelling: CodeWords) -> Iterator[Outside]:
    """What a member of an enumeration holds beside its value, and the methods of its class."""
    kind = type(member)
    for name in sorted(spelling.names & own_attributes(member).keys()):
        way = itemgetter(member.name), partial(static_attribute, name=name)
        yield Outside(f"{kind.__name__}.{member.name}.{name}", kind, way, own_attributes(member)[name])
    yield from methods_called(kind, spelling)


def _of_class(kind: type, spelling: CodeWords) -> Iterator[Outside]:
    """The attributes of a class of the user's, and of a class that makes such."""
    if not is_observable(kind) or is_library(kind.__module__):
        return
    if issubclass(kind, Enum):
        for member in islice(kind, MANY):
            yield from _of_member(member, spelling)
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
    """The entries of a container: those that code spells, or that have keys which nobody spells as constants
    (members of enumerations, dtypes, classes), and of others what holds something itself."""
    held = found.value
    if isinstance(held, MAPPINGS):
        pairs: Any = items_of(held)
    elif isinstance(held, SEQUENCES):
        pairs = enumerate(held)
    else:
        return
    if isinstance(held, dict) and len(found.way) <= 1 and _goes_through(held, found.path, spelling):
        yield Outside(f"the keys of {found.path}", found.root, (*found.way, tuple), tuple(held))
    is_noted = says_what_it_is(held)
    for position, (key, value) in enumerate(list(pairs)):
        if is_noted and type(value) in PLAIN:
            continue
        is_spelled = key in spelling.keys if type(key) in (str, int) else position < MANY and _is_fixed(key)
        if not is_spelled and isinstance(held, SEQUENCES):
            is_spelled = key - len(held) in spelling.keys
        if is_spelled or (position < MANY and type(value) not in PLAIN and not isinstance(value, Tensor)):
            ask = itemgetter(key) if asks_as_pythons(held) else partial(value_at, position=position)
            yield Outside(f"{found.path}[{key!r}]", found.root, (*found.way, ask), value)


def _is_fixed(key: object) -> bool:
    """Whether a key that is no constant of code's is one that every process has."""
    return isinstance(key, (Enum, type, dtype)) or is_literal(key)


def asks_as_pythons(held: Any) -> bool:
    """Whether asking for an entry gives what is there: a dictionary's class may make something of it."""
    return not isinstance(held, dict) or type(held).__getitem__ in _ASKING


def _goes_through(held: dict[Any, Any], path: str, spelling: CodeWords) -> bool:
    """Whether code may ask for all entries; a registry under keys of its own grows with every model."""
    is_looked_up = path.removeprefix("global ").removeprefix("closure ") in spelling.looked_up
    asks = not (is_looked_up or spelling.names.isdisjoint(FOR_ALL))
    return asks and 0 < len(held) <= MANY and all(isinstance(key, str) for key in held)


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


def is_of_run(value: object) -> bool:
    """Whether a run has put it there: a tensor of its own, alone or in a container, not to be kept alive, or
    what nobody may read."""
    kind = type(value)
    if issubclass(kind, StandIn):
        return True
    if not issubclass(kind, (dict, *SEQUENCES)):
        return issubclass(kind, FakeTensor)
    held: Any = dict.values(value) if isinstance(value, dict) else value
    return any(issubclass(type(each), FakeTensor) for each in held)


def says_what_it_is(value: Any) -> bool:
    """Whether another one in its place decides, whatever it holds: a class, nothing yet, or a row of things
    that are not numbers."""
    if value is None or value is NOTHING or isinstance(value, type):
        return True
    return type(value) in SEQUENCES and len(value) <= MANY and not any(map(is_of_run, value))


def goes_as_pythons(kind: type) -> bool:
    if not issubclass(kind, tuple):
        return is_container(kind)
    return kind.__iter__ is tuple.__iter__ and kind.__len__ is tuple.__len__
