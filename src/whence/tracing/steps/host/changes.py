"""What a step has changed of what it is part of, place by place."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from whence._torch.observe.attribute_reads import NOTHING, own_attributes
from whence._torch.plain_values import same_objects
from whence.dependence.snapshots import (
    ATTRIBUTES,
    CELL,
    CLASS,
    CONTAINER,
    SLOTS,
    VARIABLE,
    Saved,
    content_of_slots,
)
from whence.program.arguments.host_state import HostPlace
from whence.tracing.reads.outside.modules import OF_MODULES
from whence.tracing.steps.optimizer import is_same_value

_NAMING = (ATTRIBUTES, SLOTS, CLASS)
_NOWHERE = MappingProxyType[Any, Any]({})
_CHANGED_AT_ONCE: Any = object()
"""The key of what is changed in a way that has no place."""


@dataclass(frozen=True)
class HostChange:
    """A place with what was there and what is there now; `appended` is what a list has grown by instead."""

    place: HostPlace
    before: Any = None
    after: Any = None
    appended: tuple[Any, ...] = ()

    @property
    def is_repeatable(self) -> bool:
        """Whether a program can do it again: nothing was taken away, or put elsewhere than at the end."""
        return bool(self.appended) or (self.after is not NOTHING and self.place.key is not _CHANGED_AT_ONCE)

    @property
    def is_of_numbers(self) -> bool:
        """Whether there was a number: what steps make of one is computed in every run."""
        return not self.appended and type(self.before) in (int, float)


def changes_of(rows: Iterable[Saved], stays: Callable[[HostPlace, object], bool]) -> Iterator[HostChange]:
    """All changes of these things since they were looked at, but for what the capture itself has put in a
    place, and `stays` there."""
    for row in rows:
        if not row.is_unchanged:
            yield from (each for each in _host_changes(row) if not stays(each.place, each.after))


def places_in(row: Saved) -> Iterator[HostPlace]:
    """Where a thing holds something now."""
    if row.kind is CELL:
        yield HostPlace(row.path, row.thing)
    elif row.kind is VARIABLE:
        yield HostPlace(row.path, row.thing.namespace, row.thing.name)
    elif row.kind is ATTRIBUTES:
        held = own_attributes(row.thing)
        yield from (HostPlace(f"{row.path}.{key}", held, key) for key in held)
    elif row.kind is CLASS:
        yield from (HostPlace(f"{row.path}.{key}", row.thing, key) for key in CLASS.read(row.thing))
    elif row.kind is SLOTS:
        yield from (HostPlace(f"{row.path}.{key}", row.thing, key) for key in content_of_slots(row.thing))
    elif row.kind is CONTAINER and isinstance(row.thing, dict | list):
        keys = row.thing if isinstance(row.thing, dict) else range(len(row.thing))
        yield from (HostPlace(f"{row.path}[{key!r}]", row.thing, key) for key in keys)


def _host_changes(row: Saved) -> Iterator[HostChange]:
    if row.kind is CONTAINER and isinstance(row.thing, list | deque):
        before, now = list(row.before), list(row.thing)
        kept = _entries_kept(before, now, row.thing)
        if kept is None:
            yield HostChange(HostPlace(row.path, row.thing, _CHANGED_AT_ONCE))
        elif appended := tuple(now[kept:]):
            yield HostChange(HostPlace(row.path, row.thing), appended=appended)
        else:
            for at, then in enumerate(before):
                yield from _changed(HostPlace(f"{row.path}[{at}]", row.thing, at), then)
        return
    is_named = row.kind in _NAMING or (row.kind is CONTAINER and isinstance(row.thing, dict))
    if row.kind is CONTAINER and is_named and _is_reordered(row.before, CONTAINER.read(row.thing)):
        yield HostChange(HostPlace(row.path, row.thing, _CHANGED_AT_ONCE))
    places = {place.key: place for place in places_in(row)}
    if is_named:
        spelling = "{}[{!r}]" if row.kind is CONTAINER else "{}.{}"
        gone = (key for key in row.before if key not in places)
        places |= {key: HostPlace(spelling.format(row.path, key), _NOWHERE, key) for key in gone}
    for key, place in places.items():
        yield from _changed(place, row.before.get(key, NOTHING) if is_named else row.before)
    for name in () if places else row.changed_names():
        yield HostChange(HostPlace(name, row.thing, _CHANGED_AT_ONCE))


def _is_reordered(before: Iterable[Any], now: Iterable[Any]) -> bool:
    """Whether what stays in a dictionary has another order there, or no longer comes first."""
    at = {key: position for position, key in enumerate(now)}
    staying = [at[key] for key in before if key in at]
    return staying != list(range(len(staying)))


def _changed(place: HostPlace, before: Any) -> Iterator[HostChange]:
    after = place.now()
    if not is_same_value(before, after):
        yield HostChange(place, before, after)


def _entries_kept(before: Sequence[Any], now: Sequence[Any], thing: Any) -> int | None:
    """How many entries are those of before; None where entries are gone."""
    if len(now) == len(before) and not isinstance(thing, deque):
        return len(now)
    if len(now) > len(before):
        return len(before) if same_objects(before, now[: len(before)]) else None
    full = isinstance(thing, deque) and thing.maxlen == len(now)
    starts = range(len(before) + 1) if full else ()
    return next(
        (len(before) - at for at in starts if same_objects(before[at:], now[: len(before) - at])), None
    )


def is_of_modules(change: HostChange, buffers: Set[int]) -> bool:
    """Whether it is about what every module has, or a tensor that took the place of one in these tables of
    `buffers`: programs change these by themselves."""
    if id(change.place.holder) in buffers:
        return isinstance(change.before, Tensor) and isinstance(change.after, Tensor)
    return change.place.is_of_module and change.place.key in OF_MODULES
