"""What a run reads and writes, and the next run finds otherwise."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from typing import Any, cast

from torch import nn

from whence._torch.observe.attribute_reads import TABLES, own_attributes
from whence._torch.observe.hooks import HOOK_FLAGS, HOOK_KINDS
from whence._torch.plain_values import PLAIN, same_constant
from whence.dependence.observed import Change, Left, Read
from whence.dependence.snapshots import (
    CONTAINERS,
    Container,
    Saved,
    attributes_and_slots,
    containers_saved,
    same_items,
    slots_of,
)
from whence.tracing.reads.type_queries import StandIn
from whence.tracing.sandbox.probes import plain

_WHOLE = "__dict__"
_TABLES = (*HOOK_KINDS, *(flag for flags in HOOK_FLAGS.values() for flag in flags))
_NO_HOOKS = (0,) * len(_TABLES)


class ContainerSnapshot:
    """What changes are told from: attributes of modules and hooks at the start, containers as they were when
    they were read.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._hooks = [(module, _hook_counts(module)) for module in modules]
        self._start = {id(module): dict(own_attributes(module)) for module, _ in self._hooks}
        self._met: dict[int, dict[str, Any]] = dict(self._start)
        self._made: dict[int, object] = {}
        self._contents: dict[int, list[Saved]] = {}
        self._own: set[tuple[int, str]] = set()
        self._put: set[tuple[int, str]] = set()
        self._attributes: dict[int, dict[str, Any]] = {}
        self._computed: dict[type, frozenset[str]] = {}
        self._tables: dict[tuple[int, str], str] = {}
        for module, _ in self._hooks:
            self.begin(module)

    def begin(self, holder: object) -> None:
        """Remember which attributes are there that reading puts there."""
        held = own_attributes(holder)
        if id(holder) not in self._met:
            self._met[id(holder)] = dict(held)
        self._own |= {(id(holder), name) for name in self._computed_by(type(holder)) if name in held}

    def has_got(self, holder: object, name: str, value: object) -> bool:
        """Whether the run has put a value under a name of a thing since it was met.

        What was there before the run, and is put there, was met where it came from.
        """
        before = self._met.get(id(holder))
        return before is not None and name in own_attributes(holder) and before.get(name, self) is not value

    def passes_over(self, made: object) -> None:
        """Changes of what the run itself has made are no changes: the next run makes another."""
        self._made[id(made)] = made

    def keep(self, holder: object, name: str, value: object) -> None:
        """Remember whether the holder itself has the attribute, and what a container holds now.

        What the run has put there before it reads it first, the next run puts there, too: no change.
        """
        is_computed = name in self._computed_by(type(holder))
        if not is_computed and self.has_got(holder, name, value):
            self._put.add((id(holder), name))
        if not is_computed and name in attributes_and_slots(holder):
            self._own.add((id(holder), name))
        if (table := _table_of(name, attributes_and_slots(holder))) is not None:
            self._tables[id(holder), name] = table
        if name == _WHOLE:
            self._attributes[id(holder)] = dict(own_attributes(holder))
        elif issubclass(type(value), CONTAINERS) and id(value) not in self._contents:
            self._contents[id(value)] = containers_saved([(name, cast(Container, value))], but=StandIn)

    def was_written(self, read: Read) -> bool:
        """Whether an object held what the run itself had put there: asked when all is as it was before it."""
        is_own = read.is_there and (id(read.holder), read.name) in self._own
        if not is_own or isinstance(read.holder, nn.Module):
            return False
        return attributes_and_slots(read.holder).get(read.name, self) is not read.value

    def _computed_by(self, kind: type) -> frozenset[str]:
        """The attributes of a class that reading puts there."""
        if kind not in self._computed:
            rows = (row for base in kind.__mro__ for row in vars(base).items())
            self._computed[kind] = frozenset(name for name, held in rows if isinstance(held, cached_property))
        return self._computed[kind]

    def changes(self, reads: Sequence[Read]) -> tuple[Change, ...]:
        """Everything that was read and is otherwise now."""
        found = tuple(self._found(reads))
        self._contents.clear()
        self._attributes.clear()
        self._start.clear()
        self._met.clear()
        self._made.clear()
        self._put.clear()
        return found

    def put(self) -> tuple[Change, ...]:
        """What modules hold now under a name of theirs, and did not at the start."""
        found = list[Change]()
        for module, _ in self._hooks:
            held, before = own_attributes(module), self._start[id(module)]
            for name, value in () if same_items(held, before) else held.items():
                if before.get(name, self) is not value:
                    found.append(Change(module, name, value))
        return tuple(found)

    def _found(self, reads: Sequence[Read]) -> Iterator[Change]:
        copies = dict[int, object]()  # one of each container, whoever holds it
        for read in (read for read in reads if not self._is_made(read)):
            held = attributes_and_slots(read.holder)
            was_held = (id(read.holder), read.name) in self._own
            if read.name == _WHOLE:
                before = self._attributes.get(id(read.holder), held)
                rows = [(name, value) for name, value in held.items() if before.get(name, read) is not value]
                yield from (Change(read.holder, name, copy_of(value, copies)) for name, value in rows)
            elif read.name not in held:
                yield from self._registered(read, held, copies)
                if was_held:
                    yield Change(read.holder, read.name, None, is_there=False)
            elif not self._is_as_at_start(read, held[read.name]) and (
                not was_held or not self._is_as_read(held[read.name], read.value)
            ):
                yield Change(read.holder, read.name, copy_of(held[read.name], copies))
        for module, counts in self._hooks:
            if (after := _hook_counts(module)) is counts:
                continue
            for name, count, now in zip(_TABLES, counts, after, strict=True):
                if count != now:
                    yield Change(module, name, copy(vars(module)[name]))

    def _is_made(self, read: Read) -> bool:
        return id(read.holder) in self._made or (id(read.holder), read.name) in self._put

    def _registered(self, read: Read, held: Mapping[str, Any], copies: dict[int, object]) -> Iterator[Change]:
        """A table of a module that got what was looked for in vain, or None; or that lost what was read."""
        table = self._tables.get((id(read.holder), read.name)) or _table_of(read.name, held)
        if table is None:
            return
        now = held[table].get(read.name)
        if (read.value is None) is not (now is None) or (not read.is_there and read.name in held[table]):
            yield Change(read.holder, table, copy_of(held[table], copies), entry=read.name)

    def _is_as_at_start(self, read: Read, value: Any) -> bool:
        """Whether a run that wrote the attribute, and read what it wrote, has put it back."""
        start = self._start.get(id(read.holder), {})
        return read.name in start and start[read.name] is value and not isinstance(value, CONTAINERS)

    def _is_as_read(self, value: Any, read: Any) -> bool:
        if value is not read:
            return type(plain(value)) in PLAIN and same_constant(plain(read), plain(value))
        return all(content.is_unchanged for content in self._contents.get(id(value), ()))


def _table_of(name: str, held: Mapping[str, Any]) -> str | None:
    """Which table of a module has a name; None for what is no module, or has it elsewhere."""
    return next((table for table in TABLES if name in held.get(table, ())), None)


def copy_of(value: object, known: dict[int, object] | None = None) -> object:
    """The value, or a copy of a container and those inside it, which the next run would fill further."""
    if not isinstance(value, CONTAINERS):
        return value
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    made = known[id(value)] = copy(value)
    if isinstance(made, dict):
        for key in [key for key, held in made.items() if isinstance(held, CONTAINERS)]:
            made[key] = copy_of(made[key], known)
    elif isinstance(made, list | deque):
        for at, held in enumerate(made):
            made[at] = copy_of(held, known)
    return made


def _hook_counts(module: nn.Module) -> Sequence[int]:
    held = own_attributes(module)
    if not any(map(held.get, _TABLES)):
        return _NO_HOOKS
    return [len(held.get(name, ())) for name in _TABLES]


@contextmanager
def applied(left: Left) -> Iterator[None]:
    """Everything as the run left it, while the block runs."""
    changes = (*left.put, *left.changes)
    rows = ((change, attributes_and_slots(change.holder)) for change in changes)
    before = [(change, held.get(change.name), change.name in held) for change, held in rows]
    outer = [row.now() for row in left.outer]
    try:
        for row in left.outer:
            row.restore()
        for change in changes:
            _write_change(change)
        yield
    finally:
        for row in reversed(outer):
            row.restore()
        for change, value, was_there in before:
            _write_change(Change(change.holder, change.name, value, was_there))


def _write_change(change: Change) -> None:
    slot = dict(slots_of(type(change.holder))).get(change.name)
    if slot is not None:
        slot.__set__(change.holder, change.after) if change.is_there else slot.__delete__(change.holder)
    elif change.is_there:
        vars(change.holder)[change.name] = change.after
    else:
        vars(change.holder).pop(change.name, None)
