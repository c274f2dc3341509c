"""Who has what a step changes, up to what is there as long as the step itself."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from functools import partial
from types import CellType
from typing import Any

from whence._torch.observe.attribute_reads import own_attributes
from whence._torch.plain_values import PLAIN
from whence.dependence.snapshots import ATTRIBUTES, CELL, CONTAINER, SLOTS, VARIABLE, Saved
from whence.program.arguments.host_state import HostPlace, Owner


class Owners:
    """Where each thing that a step leads to is kept, as it was before the step; `lasting` are things that no
    other takes the place of.
    """

    def __init__(self, rows: Iterable[Saved], lasting: Set[int]) -> None:
        rows = list(rows)
        self._lasting = lasting
        self._things = {id(own_attributes(row.thing)): row.thing for row in rows if row.kind is ATTRIBUTES}
        self._places: dict[int, list[Callable[[], HostPlace]]] = {}
        for row in rows:
            for place, value in _held_in(row):
                if type(value) not in PLAIN:
                    self._places.setdefault(id(value), []).append(place)

    def of(self, place: HostPlace, below: Set[int] = frozenset()) -> HostPlace:
        """The place with its owner, and theirs."""
        if place.owner is not None or isinstance(place.holder, CellType):
            return place
        thing = self._things.get(id(place.holder), place.holder)
        made = () if id(thing) in self._lasting else self._places.get(id(thing), ())
        places = [make() for make in made]
        inside = below | {id(thing)}
        around = tuple(self.of(each, inside) for each in places if not self._leads_to(each, inside))
        return replace(place, owner=Owner(thing, around)) if around else place

    def _leads_to(self, place: HostPlace, things: Set[int]) -> bool:
        """Whether a place is in one of these things: what holds itself is found by another way."""
        return id(self._things.get(id(place.holder), place.holder)) in things


def _held_in(row: Saved) -> Iterator[tuple[Callable[[], HostPlace], Any]]:
    """What was in a thing before, each with how its place is made: there may be many."""
    if row.kind is CELL:
        yield partial(HostPlace, row.path, row.thing), row.before
    elif row.kind is VARIABLE:
        yield partial(HostPlace, row.path, row.thing.namespace, row.thing.name), row.before
    elif row.kind is ATTRIBUTES:
        held = own_attributes(row.thing)
        for key, value in row.before.items():
            yield partial(HostPlace, f"{row.path}.{key}", held, key), value
    elif row.kind is SLOTS:
        for key, value in row.before.items():
            yield partial(HostPlace, f"{row.path}.{key}", row.thing, key), value
    elif row.kind is CONTAINER and isinstance(row.before, dict | list | deque):
        pairs = row.before.items() if isinstance(row.before, dict) else enumerate(row.before)
        for key, value in pairs:
            yield partial(_entry, row, key), value


def _entry(row: Saved, key: Any) -> HostPlace:
    return HostPlace(f"{row.path}[{key!r}]", row.thing, key)
