"""Who has what a step changes, up to what is there as long as the step itself."""

from collections import deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from types import CellType
from typing import Any

from whence._torch.observe.attribute_reads import own_attributes
from whence.dependence.snapshots import ATTRIBUTES, CELL, CONTAINER, VARIABLE, Saved
from whence.program.arguments.host_state import HostPlace, Owner


class Owners:
    """Where each thing that a step leads to is kept, as it was before the step; `lasting` are things that no
    other takes the place of.
    """

    def __init__(self, rows: Iterable[Saved], lasting: Set[int]) -> None:
        rows = list(rows)
        self._lasting = lasting
        self._things = {id(own_attributes(row.thing)): row.thing for row in rows if row.kind is ATTRIBUTES}
        self._places: dict[int, list[HostPlace]] = {}
        for row in rows:
            for place, value in _held_in(row):
                self._places.setdefault(id(value), []).append(place)

    def of(self, place: HostPlace, below: Set[int] = frozenset()) -> HostPlace:
        """The place with its owner, and theirs."""
        if isinstance(place.holder, CellType):
            return place
        thing = self._things.get(id(place.holder), place.holder)
        places = () if id(thing) in self._lasting else self._places.get(id(thing), ())
        inside = below | {id(thing)}
        around = tuple(self.of(each, inside) for each in places if not self._leads_to(each, inside))
        return replace(place, owner=Owner(thing, around)) if around else place

    def _leads_to(self, place: HostPlace, things: Set[int]) -> bool:
        """Whether a place is in one of these things: what holds itself is found by another way."""
        return id(self._things.get(id(place.holder), place.holder)) in things


def _held_in(row: Saved) -> Iterator[tuple[HostPlace, Any]]:
    """Every place in a thing, with what was there before."""
    if row.kind is CELL:
        yield HostPlace(row.path, row.thing), row.before
    elif row.kind is VARIABLE:
        yield HostPlace(row.path, row.thing.namespace, row.thing.name), row.before
    elif row.kind is ATTRIBUTES:
        held = own_attributes(row.thing)
        yield from ((HostPlace(f"{row.path}.{key}", held, key), value) for key, value in row.before.items())
    elif row.kind is CONTAINER and isinstance(row.before, dict | list | deque):
        pairs = row.before.items() if isinstance(row.before, dict) else enumerate(row.before)
        yield from ((HostPlace(f"{row.path}[{key!r}]", row.thing, key), value) for key, value in pairs)
