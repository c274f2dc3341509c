"""Is a call of a module the same as one that was recorded?

Two calls are alike where everything that the recorded one looked at is the same in the other: its arguments,
every attribute that was read, the variables outside, the modes. What is compared is what was read, in the
order it was read, from the module called down: so each module and tensor of the one call is found in the
other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.observe.attribute_reads import (
    NOTHING,
    TABLES,
    class_attribute,
    is_observable,
    own_attributes,
)
from whence._torch.observe.hooks import has_own_hooks
from whence._torch.plain_values import PLAIN, same_constant
from whence._torch.pytrees import TreeSpec
from whence._torch.sizes.symbols import SYMBOLIC, spelled
from whence.dependence.object_graph import ReachedThing, is_steady
from whence.dependence.snapshots import Saved, content_of_cell, content_of_slot
from whence.dependence.tensor_facts import AllFacts, all_facts_of, first_difference
from whence.dependence.variables import OutsideVariables

COMPUTED = "?"
"""The place of an attribute that its holder's own `__getattr__` makes up."""
SLOT = "."
"""The place of an attribute that its holder keeps outside its dictionary."""
_EMPTY: dict[str, Any] = {}
_SEEN = (
    *(dict, list, tuple, set, frozenset, deque, type),
    *(FunctionType, BuiltinFunctionType, MethodType, partial, property, classmethod, staticmethod),
)
_DEPTH = 10


@dataclass(frozen=True, slots=True)
class Look:
    """One attribute that was read: where its holder keeps it, and what it was.

    `table` is one of the module's tables or `SLOT`, empty for the holder's own attributes, and None for what
    its class has; a value of the class is the same for every instance, so `holder` is then the class.
    `content` are copies of a container and of those inside it.
    """

    holder: object
    name: str
    table: str | None
    value: Any
    content: tuple[Saved, ...] = ()
    is_there: bool = True


@dataclass(frozen=True)
class Conditions:
    """All that a recorded call depended on.

    `tensors` are the facts of every tensor that was an argument or was read, by identity. `called` are the
    modules that were called inside it, itself among them; `inside` all that are parts of it, and
    `holders` everything whose attributes were read. `computing` are those among them that make up attributes.
    """

    module: nn.Module
    spec: TreeSpec
    leaves: tuple[Any, ...]
    looks: tuple[Look, ...]
    outside: OutsideVariables
    modes: tuple[Any, ...]
    called: tuple[nn.Module, ...]
    tensors: dict[int, tuple[Tensor, AllFacts]]
    holders: frozenset[int]
    inside: frozenset[int]
    computing: tuple[ReachedThing, ...]

    @cached_property
    def of_classes(self) -> tuple[Look, ...]:
        """What was read of classes, once for each class."""
        found = {
            (kind, look.name): replace(look, holder=kind)
            for look in self.looks
            if look.table is None and look.is_there
            for kind in [look.holder if isinstance(look.holder, type) else type(look.holder)]
        }
        return tuple(found.values())

    @cached_property
    def own(self) -> tuple["Own", ...]:
        """What was read of each module or object itself, in the order in which they were met."""
        looks: dict[int, list[Look]] = {}
        for look in self.looks:
            looks.setdefault(id(look.holder), []).append(look)
        return tuple(_looks_of_one(rows) for rows in looks.values())


@dataclass(frozen=True, slots=True)
class Own:
    """What was read of one thing: attributes that it holds, and names that are its class's, or nobody's."""

    holder: object
    looks: tuple[Look, ...]
    free: frozenset[str]
    absent: frozenset[str]


def _looks_of_one(looks: Sequence[Look]) -> Own:
    held_by_others = frozenset(look.name for look in looks if look.table is None)
    absent = frozenset(look.name for look in looks if look.table is None and not look.is_there)
    return Own(
        looks[0].holder, tuple(look for look in looks if look.table is not None), held_by_others, absent
    )


@dataclass
class Likeness:
    """What stands in a call for what the recorded one used: `things` and `tensors` by identity; `values` are
    what was found in the place of what it read, by the identity of the look."""

    things: dict[int, Any] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)

    def thing(self, thing: Any) -> Any:
        """What stands for a module or object: itself, if it is not a part of the call."""
        return self.things.get(id(thing), thing)


class Different(Exception):
    """A call is not like the recorded one; the text says why."""


def likeness(
    conditions: Conditions, module: nn.Module, spec: TreeSpec, leaves: Sequence[Any], modes: tuple[Any, ...]
) -> Likeness:
    """How a call corresponds to the recorded one; raises `Different`."""
    if type(module) is not type(conditions.module) or spec != conditions.spec:
        raise Different("it is called with other arguments")
    if modes != conditions.modes:
        raise Different("a mode (of gradients, autocast, attention …) is another")
    comparison = _Comparison(conditions, Likeness({id(conditions.module): module}))
    comparison.not_told_apart(conditions.module, module, lambda: f"this {type(module).__name__}")
    for position, (before, now) in enumerate(zip(conditions.leaves, leaves, strict=True)):
        comparison.same(before, now, partial(_argument_at, position))
    for look in conditions.of_classes:
        comparison.look(look)
    for own in conditions.own:
        comparison.own(own)
    for changed in conditions.outside.changed():
        raise Different(f"{changed} has changed")
    for held_before in conditions.computing:
        if not held_before.is_unchanged:
            raise Different(f"a {type(held_before.thing).__name__} that makes up attributes has changed")
    for called in conditions.called:
        if id(called) in conditions.inside and id(called) not in comparison.found.things:
            raise Different(f"nobody can say which {type(called).__name__} stands for the recorded one")
        if has_own_hooks(comparison.found.thing(called)):
            raise Different("there are hooks on it or inside it")
    return comparison.found


def _argument_at(position: int) -> str:
    return f"argument {position}"


@dataclass(frozen=True)
class _Comparison:
    conditions: Conditions
    found: Likeness

    def own(self, own: Own) -> None:
        """Raise `Different` where a thing does not hold what the recorded one held."""
        holder = self.found.things.get(id(own.holder), own.holder)
        attributes = own_attributes(holder)
        tables = (attributes, *filter(None, map(attributes.get, TABLES)))
        if own.free and not all(map(own.free.isdisjoint, tables)):
            raise Different(f"a {type(holder).__name__} has attributes that the recorded one did not have")
        for name in own.absent:
            if class_attribute(type(holder), name) is not NOTHING:
                raise Different(f"`{name}` was absent")
        for look in own.looks:
            if look.table == COMPUTED:
                if holder is not look.holder:
                    raise Different(f"`{look.name}` is computed by {type(holder).__name__} itself")
            elif look.table == SLOT:
                self._look(look, held(holder, look.name, SLOT))
            else:
                table = attributes.get(look.table) or _EMPTY if look.table else attributes
                now = table.get(look.name, NOTHING)
                if now is not look.value or type(now) not in PLAIN:
                    self._look(look, now)

    def look(self, look: Look) -> None:
        """Raise `Different` where an attribute of a class is not what it was."""
        self._look(look, held(look.holder, look.name, look.table))

    def _look(self, look: Look, now: Any) -> None:
        if look.content and not all(content.is_unchanged for content in look.content):
            raise Different(f"`{look.name}` of the recorded one has changed")
        self.same(look.value, now, lambda: f"`{look.name}`")
        self.found.values[id(look)] = now

    def same(self, before: Any, now: Any, what: Callable[[], str], depth: int = _DEPTH) -> None:
        """Raise `Different` where two values are not alike."""
        kind = type(before)
        if issubclass(kind, Tensor):
            self._same_tensor(before, now, what)
        elif kind is not type(now):
            raise Different(f"{what()} is a {type(now).__name__}, not a {kind.__name__}")
        elif kind in PLAIN:
            if not same_constant(before, now):
                raise Different(f"{what()} is {now!r}, not {before!r}")
        elif kind in SYMBOLIC:  # not known yet: it is what it is computed from
            if spelled(before) != spelled(now):
                raise Different(f"{what()} is {spelled(now)}, not {spelled(before)}")
        elif not depth:
            raise Different(f"{what()} is nested too deeply")
        elif kind in (slice, range):
            ends = (before.start, before.stop, before.step), (now.start, now.stop, now.step)
            self._same_items(*ends, what, depth)
        elif kind in (list, tuple, torch.Size, set, frozenset):
            self._same_items(list(before), list(now), what, depth)
        elif kind is dict:
            self._same_items(list(before), list(now), what, depth)
            self._same_items(list(before.values()), list(now.values()), what, depth)
        else:
            self._same_object(before, now, what, depth)

    def _same_items(
        self, before: Sequence[Any], now: Sequence[Any], what: Callable[[], str], depth: int
    ) -> None:
        if len(before) != len(now):
            raise Different(f"{what()} holds {len(now)} things, not {len(before)}")
        for first, second in zip(before, now, strict=True):
            self.same(first, second, what, depth - 1)

    def _same_tensor(self, before: Tensor, now: Any, what: Callable[[], str]) -> None:
        if not isinstance(now, Tensor):
            raise Different(f"{what()} is no tensor")
        self.not_told_apart(before, now, what)
        known = self.found.tensors.get(id(before))
        if known is not None:
            if known is not now:
                raise Different(f"{what()} is another tensor than it was elsewhere")
            return
        if self.found.taken.setdefault(id(now), id(before)) != id(before):
            raise Different(f"{what()} is the same tensor as another one")
        facts = all_facts_of(now)
        if facts != self.conditions.tensors[id(before)][1]:
            raise Different(
                f"{what()} differs: {first_difference(self.conditions.tensors[id(before)][1], facts)}"
            )
        self.found.tensors[id(before)] = now

    def not_told_apart(self, before: Any, now: Any, what: Callable[[], str]) -> None:
        """A thing that a variable leads to can be recognised, so nothing else can stand for it."""
        reached = self.conditions.outside.reached
        if before is not now and (before in reached or now in reached):
            raise Different(f"{what()} can be recognised: a variable leads to it")

    def _same_object(self, before: Any, now: Any, what: Callable[[], str], depth: int) -> None:
        self.not_told_apart(before, now, what)
        if isinstance(before, nn.Module) or id(before) in self.conditions.holders:
            if self.found.things.setdefault(id(before), now) is not now:
                raise Different(f"{what()} is another module than it was elsewhere")
            if self.found.taken.setdefault(id(now), id(before)) != id(before):
                raise Different(f"{what()} is the same module as another one")
            return
        if before is now:
            if not is_seen(before):
                raise Different(f"{what()} is a {type(now).__name__}, whose changes nobody sees")
            return
        self._same_function(before, now, what, depth)

    def _same_function(self, before: Any, now: Any, what: Callable[[], str], depth: int) -> None:
        if isinstance(before, MethodType):
            pairs: list[tuple[Any, Any]] = [(before.__func__, now.__func__), (before.__self__, now.__self__)]
        elif isinstance(before, partial):
            pairs = [(before.func, now.func), (before.args, now.args), (before.keywords, now.keywords)]
        elif isinstance(before, FunctionType) and before.__code__ is now.__code__:
            pairs = [
                (before.__defaults__, now.__defaults__),
                (before.__kwdefaults__, now.__kwdefaults__),
                (_closure(before), _closure(now)),
            ]
        elif isinstance(before, BuiltinFunctionType) and before == now:
            return
        else:
            raise Different(f"{what()} is a {type(now).__name__} that cannot be compared")
        for first, second in pairs:
            self.same(first, second, what, depth - 1)


def _closure(function: FunctionType) -> list[Any]:
    return [content_of_cell(cell) for cell in function.__closure__ or ()]


def is_seen(thing: Any) -> bool:
    """Whether a thing does not change, or its changes are seen where it is read."""
    return is_steady(thing) or isinstance(thing, _SEEN) or is_observable(type(thing))


def held(holder: Any, name: str, table: str | None) -> Any:
    """What a holder keeps under a name, looked at without asking it."""
    if table is None:
        return class_attribute(holder if isinstance(holder, type) else type(holder), name)
    if table == SLOT:
        return content_of_slot(class_attribute(type(holder), name), holder)
    own = own_attributes(holder)
    return own.get(name, NOTHING) if not table else own[table].get(name, NOTHING)


def place_of(holder: Any, name: str) -> str | None:
    """Where a holder keeps an attribute: a table, itself (""), or its class (None)."""
    own = own_attributes(holder)
    if name in own:
        return ""
    if isinstance(class_attribute(type(holder), name), MemberDescriptorType):
        return SLOT
    return next((table for table in TABLES if name in (own.get(table) or ())), None)
