"""What was looked at when a check found nothing: while all of it is the same, neither will the next.

Nearly all checks find nothing, and one runs before every call, on a machine whose caches the call before has
filled with other things. So what a module holds is fetched at once and compared by identity, its hooks by
being none, and tensors by what may change in them. What holds other things, and may change without being
replaced, is compared with its guard in every check. The rules are in `check.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

from torch import nn

from whence._torch.observe.attribute_reads import TABLES
from whence._torch.observe.hooks import HOOK_KINDS
from whence._torch.observe.wrappers import seen_through, wrapper_chain
from whence._torch.plain_values import same_objects
from whence._torch.subclasses.fully_sharded import class_as_written
from whence.dependence.describe import Describer, described_hooks, hook_rows
from whence.dependence.lookup import NOTHING, class_attribute, module_attribute
from whence.dependence.matching import Walk, difference, found_in_place
from whence.program.guards.expectations import (
    Expectation,
    ExpectedConstant,
    ExpectedHolder,
    ExpectedNames,
    ExpectedTensor,
    Hooks,
    Items,
    Missing,
)
from whence.program.guards.guards import GuardPlan, HolderPlan
from whence.program.guards.rows import Guard
from whence.schema import GuardKind

_hooks_of = itemgetter(*HOOK_KINDS)
_seen_of = attrgetter("requires_grad", "dtype", "device", "shape")
Place = tuple[dict[str, Any], str, Any]
"""A dictionary, a name in it, and what it led to."""


Met = tuple[int, Any, str]
"""The number of an object, the object, and where it was met."""
Seen = tuple[tuple[Any, ...], tuple[int, ...], tuple[str, ...]]
"""What may change in a tensor, its strides, and the attributes that somebody put on it."""


class SeenModule(NamedTuple):
    """What was looked at of one module: `read` fetches `values` from its attributes `held`.

    It has no hooks, where it `is_unhooked`, and none of the `absent` attributes. `tensors` are places, each
    with what was seen of what is there.
    """

    held: dict[str, Any]
    read: Callable[[Any], tuple[Any, ...]]
    values: tuple[Any, ...]
    is_unhooked: bool
    absent: tuple[str, ...]
    tensors: tuple[tuple[Place, Seen | None], ...]


@dataclass(frozen=True)
class LastCheck:
    """All that was looked at, and what was met.

    `places` are where modules are. `wrapped` are modules with what is inside them, and what is seen through
    on the way. `others` are guards to compare by themselves, with their modules.
    """

    plan: GuardPlan
    roots: tuple[object, ...]
    modules: tuple[nn.Module, ...]
    types: tuple[type, ...]
    places: tuple[Place, ...]
    wrapped: tuple[tuple[Any, nn.Module, tuple[nn.Module, ...]], ...]
    rows: tuple[SeenModule, ...]
    others: tuple[tuple[Guard, nn.Module], ...]
    walk: Walk

    def again(self, plan: GuardPlan, roots: Sequence[object], walk: Walk) -> Walk | None:
        """What is met now, where all is as it was; else None."""
        is_asked = plan is self.plan and same_objects(roots, self.roots)
        if not is_asked or walk.same_model != self.walk.same_model:
            return None
        try:
            if not (self._are_placed() and all(map(_is_cached_state, self.rows))):
                return None
        except (KeyError, RuntimeError):  # a tensor that has been emptied has no shape
            return None
        met = _copy_of_walk(self.walk, self.walk.waiting)
        return met if all(found_in_module(*row, met) is None for row in self.others) else None

    def _are_placed(self) -> bool:
        return (
            all(held[name] is module for held, name, module in self.places)
            and all(map(is_, map(type, self.modules), self.types))
            and all(
                seen_through(it) is inside and _wrappers(it) == found for it, inside, found in self.wrapped
            )
        )


def _copy_of_walk(walk: Walk, waiting: Sequence[Met]) -> Walk:
    return Walk(
        same_model=walk.same_model,
        spelled=walk.spelled,
        any_layout=walk.any_layout,
        holders=dict(walk.holders),
        tensors=dict(walk.tensors),
        numbers=dict(walk.numbers),
        wrappers=walk.wrappers,
        things={id(thing): (number, thing) for number, thing, _ in waiting},
        waiting=list(waiting),
    )


def _is_cached_state(row: SeenModule) -> bool:
    """The hot loop, in which a call would cost as much as a look."""
    held, read, values, is_unhooked, absent, tensors = row
    if not all(map(is_, read(held), values)) or (is_unhooked and any(_hooks_of(held))):
        return False
    for name in absent:
        if name in held:
            return False
    for (table, name, tensor), seen in tensors:
        if table[name] is not tensor:
            return False
        if seen is None:
            continue
        if _seen_of(tensor) != seen[0] or tensor.stride() != seen[1] or (*tensor.__dict__,) != seen[2]:
            return False
    return True


@dataclass
class Remembered:
    """The last check that found nothing; a copy remembers nothing, for it is about a copy of the model."""

    last: LastCheck | None = None

    def __deepcopy__(self, _known: object) -> "Remembered":
        return Remembered()

    def keep(self, plan: GuardPlan, roots: Sequence[object], walk: Walk) -> None:
        """Remember what was met in modules, all of which is as expected."""
        modules = [(row, walk.holders[row.holder.number]) for row in plan.modules]
        sorted_rows = [_sorted(row, module, walk) for row, module in modules]
        places = [place for row, _ in modules for place in _places(row, walk)]
        seen = [*roots, *(held for _, _, held in places)]
        self.last = LastCheck(
            plan=plan,
            roots=tuple(roots),
            modules=tuple(module for _, module in modules),
            types=tuple(type(module) for _, module in modules),
            places=tuple(places),
            wrapped=tuple((held, seen_through(held), found) for held in seen if (found := _wrappers(held))),
            rows=tuple(held for held, _ in sorted_rows),
            others=tuple(
                (guard, module)
                for (_, module), (_, others) in zip(modules, sorted_rows, strict=True)
                for guard in others
            ),
            walk=_copy_of_walk(walk, [met for row, module in modules for met in _objects_held(row, module)]),
        )


def _wrappers(held: object) -> tuple[nn.Module, ...]:
    return wrapper_chain(held) if isinstance(held, nn.Module) else ()


def _places(row: HolderPlan, walk: Walk) -> Iterator[Place]:
    for parent, name in row.holder.names:
        table = walk.holders[parent].__dict__["_modules"]
        yield table, name, table[name]


def _objects_held(row: HolderPlan, module: nn.Module) -> Iterator[Met]:
    """The objects that a module holds itself; those in containers are met anew."""
    for guard in row.guards:
        if isinstance(guard.expected, ExpectedHolder) and guard.name in module.__dict__:
            yield guard.expected.number, module.__dict__[guard.name], guard.what


def _sorted(row: HolderPlan, module: nn.Module, walk: Walk) -> tuple[SeenModule, list[Guard]]:
    """What of a module is compared at once, and the guards that are compared by themselves."""
    held, names, absent = module.__dict__, list[str](TABLES), list[str]()
    tensors, others, is_unhooked = list[tuple[Place, Seen | None]](), list[Guard](), False
    for guard in filter(attrgetter("name"), row.guards):
        table = next((table for table in (held, *map(held.get, TABLES)) if guard.name in (table or ())), None)
        if guard.kind is GuardKind.HOOKS and guard.expected == Hooks() and id(module) not in walk.wrappers:
            is_unhooked = True
        elif table is None or guard.kind is GuardKind.STRUCTURE:
            others.append(guard)
        elif table is held and _is_fixed(guard.expected):
            names.append(guard.name)
        elif guard.expected == ExpectedConstant(None) or _is_tensor(guard.expected, walk):
            found = table[guard.name]
            seen = None if found is None else (_seen_of(found), found.stride(), (*vars(found),))
            tensors.append(((table, guard.name, found), seen))
        else:
            others.append(guard)
    for name in row.shadowed:
        (names if name in held else absent).append(name)
    read = itemgetter(*names)
    return SeenModule(held, read, read(held), is_unhooked, tuple(absent), tuple(tensors)), others


def _is_fixed(expected: Expectation) -> bool:
    """Whether what is expected can only be replaced; an object is looked into wherever it was met."""
    if isinstance(expected, Items):
        return expected.type is tuple and all(map(_is_immutable, expected.items))
    return isinstance(expected, ExpectedHolder) or _is_immutable(expected)


def _is_immutable(expected: Expectation) -> bool:
    return isinstance(expected, ExpectedConstant) and not isinstance(expected.value, set)


def _is_tensor(expected: Expectation, walk: Walk) -> bool:
    if not isinstance(expected, ExpectedTensor) or expected.parts or expected.attributes:
        return False
    if expected.facts.strides is None:
        return False
    return expected.target is None or walk.same_model


def found_in_module(guard: Guard, module: nn.Module, walk: Walk) -> str | None:
    """What is there in the place of what a guard expects, or None when that is it."""
    walk.at = guard.what
    if guard.kind is GuardKind.HOOKS:
        return _found_hooks(guard, hook_rows(module, walk.wrappers.get(id(module), ())), walk)
    if guard.kind is GuardKind.STRUCTURE:
        found = ExpectedNames(tuple(module.__dict__[guard.name]))
        return None if guard.expected == found else str(found)
    value = module_attribute(module, guard.name)
    if isinstance(guard.expected, Missing) and value is NOTHING:
        value = class_attribute(class_as_written(type(module)), guard.name)
    return found_in_place(guard.expected, value, walk)


def _found_hooks(guard: Guard, rows: Sequence[tuple[str, Any]], walk: Walk) -> str | None:
    expected = guard.expected.rows if isinstance(guard.expected, Hooks) else ()
    same = len(rows) == len(expected) and all(
        kind == wanted and difference(function, hook, walk) is None
        for (kind, hook), (wanted, function) in zip(rows, expected, strict=True)
    )
    return None if same else str(described_hooks(rows, Describer({})))
