"""What a model, or a class, leads to, each thing with its way there: a file says so of what no name leads to.

A way is a row of names: attributes, keys, positions, and variables that functions close over. Nothing of the
user's runs on it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any

from torch import nn

from whence._torch.observe.attribute_reads import NOTHING, is_observable, own_attributes
from whence.dependence.code import function_in
from whence.dependence.snapshots import content_of_cell

Way = tuple[str, ...]
_MOST = 100_000
OWN_CLASS, _CONTENT, _ATTRIBUTES = "__class__", "cell_contents", "__dict__"


def reached_from(roots: Iterable[tuple[Any, Way]]) -> Iterator[tuple[Any, Way]]:
    """Everything that is reached, what is nearest to one of the roots first, each thing once."""
    waiting = deque(roots)
    seen = set[int]()
    while waiting and len(seen) < _MOST:
        thing, way = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing, way
        waiting += ((held, (*way, name)) for name, held in _held_by(thing) if held is not None)


def at_the_end(model: Any, way: Way) -> Any:
    """What is at the end of a way now; `NOTHING` where it leads nowhere."""
    found = model
    for name in way:
        found = next((held for key, held in _held_by(found) if key == name), NOTHING)
    return found


def class_of_a_variable(namespace: Mapping[str, Any], name: str) -> type | None:
    """The class of that name which a file has deleted, and of which it holds the one object, as
    typing_extensions does with that of `NoDefault`; None where there are none, or several."""
    kinds = set(map(type, namespace.values()))
    found = [kind for kind in kinds if f"{kind.__module__}:{kind.__qualname__}" == name]
    return found[0] if len(found) == 1 else None


def _held_by(thing: Any) -> Iterable[tuple[str, Any]]:
    kind = type(thing)
    if kind in _PARTS:
        return _PARTS[kind](thing)
    if issubclass(kind, type):
        return _held_by_class(thing)
    if issubclass(kind, nn.Module) or is_observable(kind):
        return *_attributes(thing), (OWN_CLASS, kind)
    return ()


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    own = own_attributes(thing)
    yield from own.items()
    yield _ATTRIBUTES, own  # where a step puts one


def _held_by_class(kind: type) -> Iterator[tuple[str, Any]]:
    for number, base in enumerate(filter(is_observable, kind.__mro__)):
        for name, held in vars(base).items():
            yield f"{number}.{name}", function_in(held) or held


def _entries(held: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """By key, or by position: numbers of hooks are others in each process."""
    for number, (key, value) in enumerate(dict.items(held)):
        yield key if type(key) is str else f"[{number}]", value


def _items(held: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"[{number}]", value) for number, value in enumerate(held))


def _named(*names: str) -> Callable[[Any], Iterable[tuple[str, Any]]]:
    return lambda thing: [(name, getattr(thing, name)) for name in names]


_PARTS: Mapping[type, Callable[[Any], Iterable[tuple[str, Any]]]] = MappingProxyType(
    {
        FunctionType: lambda thing: zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True),
        CellType: lambda thing: [(_CONTENT, content_of_cell(thing))],
        MethodType: _named("__func__", "__self__"),
        partial: _named("func", "args", "keywords"),
        SimpleNamespace: _attributes,
        **dict.fromkeys((dict, OrderedDict), _entries),
        **dict.fromkeys((list, tuple, deque), _items),
    }
)
"""What things hold of these very classes, whose code is Python's own."""
