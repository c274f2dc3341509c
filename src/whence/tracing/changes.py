"""What a run reads and then writes: the next run finds it otherwise."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from typing import Any

from torch import nn

from whence._torch.attribute_reads import class_attribute, own_attributes
from whence._torch.hooks import HOOK_FLAGS, HOOK_KINDS
from whence.program.observed import Change, Read
from whence.tracing.modules import CONTAINERS, held_in_capture, same_items

_TABLES = (*HOOK_KINDS, *(flag for flags in HOOK_FLAGS.values() for flag in flags))


class Before:
    """What changes are told from: hooks at the start, and containers as they were when they were read."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._hooks = [(module, _hook_counts(module)) for module in modules]
        self._copies: dict[int, Any] = {}
        self._own: set[tuple[int, str]] = set()

    def keep(self, holder: object, name: str, value: object) -> None:
        """Remember whether the holder itself has the attribute, and what a container holds now."""
        if name in own_attributes(holder) and not _is_cached(holder, name):
            self._own.add((id(holder), name))
        if issubclass(type(value), CONTAINERS):
            self._copies[id(value)] = copy(value)

    def changes(self, reads: Sequence[Read]) -> tuple[Change, ...]:
        """Everything that was read and is otherwise now; nothing where tensors of the run are among it."""
        found = tuple(self._found(reads))
        self._copies.clear()
        return () if any(held_in_capture(change.after) for change in found) else found

    def _found(self, reads: Sequence[Read]) -> Iterator[Change]:
        for read in reads:
            held = own_attributes(read.holder)
            was_held = (id(read.holder), read.name) in self._own
            if read.name not in held:
                if was_held:
                    yield Change(read.holder, read.name, None, is_there=False)
            elif not was_held or not self._is_as_read(held[read.name], read.value):
                yield Change(read.holder, read.name, copy_of(held[read.name]))
        for module, counts in self._hooks:
            if _hook_counts(module) != counts:
                yield from (Change(module, name, copy(vars(module)[name])) for name in _TABLES)

    def _is_as_read(self, value: Any, read: Any) -> bool:
        if value is not read:
            return False
        before = self._copies.get(id(value), value)
        return before is value or same_items(before, value)


def _is_cached(holder: object, name: str) -> bool:
    """Whether reading it is what puts an attribute there."""
    return isinstance(class_attribute(type(holder), name), cached_property)


def copy_of(value: object) -> object:
    """The value, or a copy of a container, which the next run would fill further."""
    return copy(value) if isinstance(value, CONTAINERS) else value


def _hook_counts(module: nn.Module) -> list[int]:
    held = own_attributes(module)
    return [len(held.get(name, ())) for name in _TABLES]


@contextmanager
def applied(changes: Sequence[Change]) -> Iterator[None]:
    """The model as the run left it, while the block runs."""
    before = [
        (change, vars(change.holder).get(change.name), change.name in vars(change.holder))
        for change in changes
    ]
    try:
        for change in changes:
            _write(change)
        yield
    finally:
        for change, value, was_there in before:
            _write(Change(change.holder, change.name, value, was_there))


def _write(change: Change) -> None:
    held = vars(change.holder)
    if change.is_there:
        held[change.name] = change.after
    else:
        held.pop(change.name, None)
