"""What a step changes of its model in Python, which a bound step does itself: no guard is about that."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from whence._torch.observe.attribute_reads import NOTHING, own_attributes
from whence._torch.plain_values import PLAIN
from whence.dependence.lookup import static_attribute
from whence.dependence.observed import Left, Observed, Read
from whence.dependence.snapshots import ATTRIBUTES, Saved
from whence.program.arguments.host_state import HostPlace
from whence.program.arguments.optimizer_arguments import Outside


def without_host(observed: Observed, places: Sequence[HostPlace]) -> Observed:
    """What was observed, but for what these places hold, and for containers that they are in; of a dictionary
    that a step puts something into, other entries are constants, each by itself."""
    at, held = {place.identity for place in places}, {id(place.holder) for place in places}

    def is_left(holder: object, name: str) -> bool:
        own = own_attributes(holder)
        return (id(own), name) in at or id(own.get(name)) in held

    def is_put_again(row: Saved) -> bool:
        names = row.keys_changed() if row.kind is ATTRIBUTES else []
        return id(row.thing) in held or (bool(names) and all(is_left(row.thing, name) for name in names))

    changes = tuple(row for row in observed.left.changes if not is_left(row.holder, row.name))
    outer = tuple(row for row in observed.left.outer if not is_put_again(row))
    reads = tuple(row for row in observed.reads if not is_left(row.holder, row.name))
    left = replace(observed.left, changes=changes, outer=outer) if changes or outer else Left()
    beside = tuple((row, read.source) for read in observed.reads for row in _entries_beside(read, places))
    variables = (*observed.variables, *beside)
    put = frozenset((*at, *((holder, None) for holder in held)))
    return replace(observed, reads=reads, left=left, variables=variables, places=put)


def _entries_beside(read: Read, places: Sequence[HostPlace]) -> Iterator[Outside]:
    held = own_attributes(read.holder).get(read.name)
    put = [place.key for place in places if place.holder is held]
    if not put or not isinstance(held, dict):
        return
    for key, value in held.items():
        if key not in put and type(value) in PLAIN:
            path = f"{type(read.holder).__name__}.{read.name}[{key!r}]"
            way = (partial(static_attribute, name=read.name), partial(_entry, key=key))
            yield Outside(path, read.holder, way, value)


def _entry(held: dict[Any, Any], key: Any) -> Any:
    """An entry; asking for one must not make it."""
    return dict.get(held, key, NOTHING)
