"""What a step changes of its model in Python, which a bound step does itself: no guard is about that."""

from collections.abc import Sequence, Set
from dataclasses import replace

from whence._torch.observe.attribute_reads import own_attributes
from whence.dependence.describe import entries_of
from whence.dependence.observed import Left, Observed
from whence.dependence.snapshots import ATTRIBUTES, CONTAINERS, SLOTS, Saved, values_of
from whence.program.arguments.host_state import HostPlace


def without_host(observed: Observed, places: Sequence[HostPlace]) -> Observed:
    """What was observed, but for attributes that these places are, and lists that a step appends to; of a
    container that it puts something into, all else is looked at."""
    at, held = frozenset(place.identity for place in places), {id(place.holder) for place in places}

    def is_put(holder: object, name: str) -> bool:
        own = own_attributes(holder)
        is_attribute = (id(own), name) in at or (id(holder), name) in at  # a slot is one of the object itself
        return is_attribute or (id(own.get(name)), None) in at

    def is_changed_again(holder: object, name: str) -> bool:
        return is_put(holder, name) or _holds(own_attributes(holder).get(name), held)

    def is_put_again(row: Saved) -> bool:
        names = row.keys_changed() if row.kind in (ATTRIBUTES, SLOTS) else []
        return id(row.thing) in held or (
            bool(names) and all(is_changed_again(row.thing, name) for name in names)
        )

    left = observed.left
    changes = tuple(row for row in left.changes if not is_changed_again(row.holder, row.name))
    outer = tuple(row for row in left.outer if not is_put_again(row))
    reads = tuple(row for row in observed.reads if not is_put(row.holder, row.name))
    left = replace(left, changes=changes, outer=outer) if changes or outer else Left()
    return replace(observed, reads=reads, left=left, places=at)


def _holds(value: object, holders: Set[int]) -> bool:
    """Whether a container is one of these, or holds one."""
    waiting, seen = [value], set[int]()
    while waiting:
        found = waiting.pop()
        mapped = entries_of(found)
        entries = found if mapped is None else mapped
        if id(entries) in holders:
            return True
        if isinstance(entries, CONTAINERS) and id(entries) not in seen:
            seen.add(id(entries))
            waiting += values_of(entries)
    return False
