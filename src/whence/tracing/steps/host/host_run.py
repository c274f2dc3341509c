"""What a step changes in Python around it: numbers are inputs and outputs, other things are put there again.

A first run says what is changed. Another begins as that one has left things: with inputs for numbers, and
with stand-ins for all that is replaced or added to, which refuse whoever reads them. It has to do the same
operations and changes as the first, and then every run does.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain
from types import CellType
from typing import Any

from torch import Tensor, fx

from whence._torch.observe.attribute_reads import own_attributes
from whence._torch.plain_values import PLAIN_IN_WHOLE, same_constant
from whence._torch.pytrees import TreeSpec, spelled, tree_flatten, tree_flatten_with_path, tree_unflatten
from whence._torch.sizes.numbers import is_recorded
from whence._torch.sizes.symbols import SYMBOLIC
from whence.dependence.snapshots import Saved
from whence.errors import Place, UnsupportedStep
from whence.program.arguments.host_state import HostCall, HostEffect, HostNumber, HostPlace
from whence.program.arguments.optimizer_arguments import is_number
from whence.program.calls import Constant, Named, Structure
from whence.program.names import PREFIXES, as_name
from whence.provenance import ModulePath
from whence.schema import InputKind
from whence.tracing.recording.run import PutValue
from whence.tracing.reuse import AnotherAttempt
from whence.tracing.steps.enclosed_state import Enclosed, owners_of, refuse_changed
from whence.tracing.steps.host.changes import HostChange, changes_of, is_of_modules, places_in
from whence.tracing.steps.host.memory import lies_in, refuse_alias, refuse_shared_memory
from whence.tracing.steps.host.operations import Operations, operations_of
from whence.tracing.steps.host.owners import Owners
from whence.tracing.steps.host.schedules import refuse_read_by_schedules
from whence.tracing.steps.host.stand_ins import (
    Growing,
    Later,
    Refuse,
    Unread,
    growing,
    is_stand_in,
    left_at,
    refuse_read,
)
from whence.tracing.steps.session import StepInput, StepSession

Key = tuple[int, Any]
_Shape = tuple[Any, ...]
_NUMBER = object()
"""A number that is computed in the step."""


@dataclass(frozen=True)
class _Grown:
    """A list that grows, where it is held, and what a step appends to it."""

    place: HostPlace
    holders: tuple[HostPlace, ...]
    shape: _Shape


@dataclass(frozen=True)
class HostAssumptions:
    """What earlier runs found that the step changes.

    `numbers` and `tensors` become inputs, and so does what is `read` of schedules; `replaced` and `grown` get
    stand-ins; `things` were reached and are looked at from the beginning. `operations` are those of the first
    run. What other ways of the step change `elsewhere` is no constant of this one, and gets a stand-in where
    it is no number. A run with which nothing has `begun` finds out what the step reaches.
    """

    numbers: Mapping[Key, HostPlace] = field(default_factory=dict)
    tensors: Mapping[Key, HostPlace] = field(default_factory=dict)
    read: Mapping[Key, HostPlace] = field(default_factory=dict)
    replaced: Mapping[Key, tuple[HostPlace, _Shape]] = field(default_factory=dict)
    grown: Mapping[Key, _Grown] = field(default_factory=dict)
    things: tuple[tuple[str | ModulePath, Any], ...] = ()
    operations: Operations | None = None
    elsewhere: Mapping[Key, HostPlace] = field(default_factory=dict)
    begun: bool = True

    @classmethod
    def beside(cls, places: Iterable[HostPlace]) -> "HostAssumptions":
        """What a way of the step assumes beside others, which change what is at these places."""
        rows = {place.identity: place for each in places if (place := each.found()) is not None}
        numbers = {key: place for key, place in rows.items() if is_number(place.now())}
        others = {key: place for key, place in rows.items() if key not in numbers}
        return cls(numbers, elsewhere=others, begun=not rows)

    @property
    def settled(self) -> "HostAssumptions":
        """The same once a run did what the first one did."""
        return replace(self, operations=None)

    def knows(self, key: Key) -> bool:
        """Whether a place is among them."""
        return any(key in known for known in (self.numbers, self.tensors, self.replaced, self.grown))


@dataclass(frozen=True)
class HostOutcome:
    """What a run has done: numbers that it advanced, with input and new node, and what it puts somewhere."""

    pairs: tuple[tuple[fx.Node, fx.Node], ...] = ()
    counted: tuple[HostNumber, ...] = ()
    effects: tuple[HostEffect, ...] = ()
    calls: tuple[HostCall, ...] = ()
    kept: tuple[PutValue, ...] = ()


def asked_of_schedule(enclosed: Enclosed, places: Sequence[HostPlace]) -> AnotherAttempt:
    """The step reads what a schedule has at these places, which are inputs then.

    What it has reached by now is looked at before they are put there.
    """

    def taken(assumed: Any) -> Any:
        read = {**assumed.host.read, **{place.identity: place for place in places}}
        things = (*assumed.host.things, *enclosed.reached)
        return replace(assumed, host=replace(assumed.host, read=read, things=things))

    return AnotherAttempt(taken, f"the step reads {places[0].path}")


def _asked_of_ways(enclosed: Enclosed, key: Key) -> AnotherAttempt:
    """The step reads what other ways change, and has its value as a constant."""

    def taken(assumed: Any) -> Any:
        elsewhere = {other: place for other, place in assumed.host.elsewhere.items() if other != key}
        things = (*assumed.host.things, *enclosed.reached)
        return replace(assumed, host=replace(assumed.host, elsewhere=elsewhere, things=things))

    return AnotherAttempt(taken, "the step reads what another way of it changes")


def _kept_at(place: HostPlace) -> Iterable[HostPlace]:
    """Where a stand-in is put: a list that grows is exchanged as a whole."""
    if place.key is not None or isinstance(place.holder, CellType):
        return (place,)
    return () if place.owner is None else place.owner.places


class HostRun:
    """One run of a step, and what is around it."""

    def __init__(self, enclosed: Enclosed, assumed: HostAssumptions, session: StepSession) -> None:
        self.enclosed = enclosed
        self._assumed = assumed
        self._session = session
        self._inputs: dict[Key, tuple[HostPlace, fx.Node]] = {}
        self._parts: list[HostNumber] = []
        self._stand_ins: dict[Key, Growing] = {}
        self._put: dict[int, tuple[Unread, Key]] = {}
        self.twins: list[Tensor] = []
        for path, thing in assumed.things:
            enclosed.reach(path, thing)

    def begin(self) -> Iterator[StepInput]:
        """Put inputs and stand-ins where the step will look."""
        for key, place in self._assumed.read.items():
            yield self._number(key, place, partial(self._session.step.scheduling.read, place))
        if not self._assumed.begun:
            return
        for key, place in self._assumed.numbers.items():
            yield self._number(key, place, place.put)
        memory = [row.tensor for row in self._session.run.subject.state]
        for place in self._assumed.tensors.values():
            yield from self._tensors(place, memory)
        for key, place in self._assumed.elsewhere.items():
            for holder in _kept_at(place) if not self._assumed.knows(key) else ():
                ask = partial(_asked_of_ways, self.enclosed, key)
                self._unread(holder, lambda _, ask=ask: ask())  # type: ignore[misc]
        for place, _ in self._assumed.replaced.values():
            self._unread(place, self._refused)
        for key, grown in self._assumed.grown.items():
            self._stand_ins[key] = made = growing(grown.place.path, self._refused, grown.place.holder)
            for holder in grown.holders:
                holder.put(made)

    def _number(self, key: Key, place: HostPlace, put: Callable[[Any], None]) -> StepInput:
        name, kind = self._free_name(place.path), InputKind.STEP_STATE
        number, row = self._session.number_input(name, place.path, place.now(), kind=kind)
        put(number)
        self._inputs[key] = place, row[1]
        return row

    def _free_name(self, path: str) -> str:
        return self._session.log.free_name(f"{PREFIXES[InputKind.STEP_STATE]}_{as_name(path)}")

    def _tensors(self, place: HostPlace, memory: list[Tensor]) -> Iterator[StepInput]:
        """Inputs for a tensor, or those of a container: twins of theirs lie there while the step runs."""
        leaves, spec = tree_flatten(place.now())
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            refuse_alias(leaf, memory, place.path)
            path = place.path if len(leaves) == 1 else f"{place.path}, {at}"
            twin, node = self._session.recorder.fake_input(leaf, self._free_name(path))
            self.twins.append(twin)
            leaves[at] = twin
            self._parts.append(HostNumber(node.name, place, (type(leaf).__name__,), at, spec))
            yield self._session.input_row(node, path, kind=InputKind.STEP_STATE)
        place.put(tree_unflatten(leaves, spec))

    def _unread(self, place: HostPlace, refuse: Refuse) -> None:
        """Put a stand-in there for what the step replaces."""
        made = Unread(place.path, refuse)
        self._put[id(made)] = made, place.identity
        place.put(made)

    def _stays(self, place: HostPlace, value: object) -> bool:
        """Whether a stand-in is where it was put: a step that keeps one elsewhere has read what it is for."""
        known = self._put.get(id(value))
        return is_stand_in(value) and (known is None or known[1] == place.identity)

    def _refused(self, path: str) -> UnsupportedStep:
        return UnsupportedStep(
            f"the step reads {path}, and changes it",
            where=self._session.run.places.here(),
            why="the next run would find something else there, which is no input of the program: numbers "
            "that it advances are, and what it only writes is written again",
            remedy="keep a tensor in a buffer of the model; read what a step has collected outside of it; "
            "where only the first step changes it, take one before the capture",
        ).in_first_step()

    # --- afterwards --------------------------------------------------------------------------------------

    def settle(self, place: Place) -> HostOutcome:
        """What the step did; raises `AnotherAttempt` where more has to be assumed, and `UnsupportedStep` for
        what no program can do again, but for what it leaves on objects of the model."""
        if not self._assumed.begun:
            begun = replace(self._assumed, begun=True, things=tuple(self.enclosed.reached))
            raise AnotherAttempt(
                lambda assumed: replace(assumed, host=begun), "other ways change what is there"
            )
        renewed = self.enclosed.renewed()
        changes, left = self._changes(renewed)
        refuse_changed((path for path in self._unrepeatable(changes) if path not in renewed), place)
        unknown = [row for row in changes if not self._assumed.knows(row.place.identity)]
        if unknown:
            self._refuse_other_places(changes, unknown, place)
            more = self._more(unknown, place)
            raise AnotherAttempt(
                lambda assumed: replace(assumed, host=more), "the step changes things around it"
            )
        changes += [
            HostChange(self._assumed.grown[key].place, appended=tuple(made.added))
            for key, made in self._stand_ins.items()
            if made.added
        ]
        self._refuse_other_changes(changes, place)
        for made in self._stand_ins.values():
            made.added.clear()  # what has met the list may hold it on
        _say_left(left)
        return self._done(changes, place)

    def _changes(self, renewed: Set[str]) -> tuple[list[HostChange], list[HostChange]]:
        """What the step has changed, and beside it what that leaves on objects of the model alone."""
        modules = self._session.run.subject.named_modules()
        buffers = {id(own_attributes(module)["_buffers"]) for _, module in modules}
        held = {id(own_attributes(each.module)) for each in self.enclosed.objects}
        changes, left = list[HostChange](), list[HostChange]()
        for row in changes_of(self.enclosed.rows, self._stays):
            if row.place.path not in renewed and not is_of_modules(row, buffers):
                (left if _is_left(row, held) else changes).append(row)
        return changes, left

    def _unrepeatable(self, changes: Iterable[HostChange]) -> Iterator[str]:
        for row in changes:
            known = self._assumed.grown if row.appended else {}
            if not row.is_repeatable or row.place.identity in known:
                yield row.place.path
        yield from (
            name for row in self.enclosed.theirs if not row.is_unchanged for name in row.changed_names()
        )

    def _refuse_other_places(
        self, changes: Sequence[HostChange], unknown: Sequence[HostChange], place: Place
    ) -> None:
        """Raise `UnsupportedStep` where this run put something elsewhere than the one before, as the next one
        would again: `held[len(held)] = ...`."""
        found = {row.place.identity for row in changes}
        left = [held.path for key, (held, _) in self._assumed.replaced.items() if key not in found]
        if left:
            raise UnsupportedStep(
                f"the step puts something at {unknown[0].place.path}, and in another run at {left[0]}",
                where=place,
                why="where it puts it comes of what is there already, and a program has one place for it",
                remedy="append to a list, which a program does; or do it outside the captured step",
            )

    def _more(self, unknown: Sequence[HostChange], place: Place) -> HostAssumptions:
        then = self._assumed
        numbers, tensors = dict(then.numbers), dict(then.tensors)
        replaced, grown = dict(then.replaced), dict(then.grown)
        memory = [row.tensor for row in self._session.run.subject.state]
        for row in unknown:
            key = row.place.identity
            if row.appended:
                holders = tuple(_holders(self.enclosed.rows, row.place.holder))
                refuse_changed([] if holders else [row.place.path], place)
                grown[key] = _Grown(row.place, holders, self._shape(row, place))
            elif row.is_of_numbers and is_number(row.after):
                numbers[key] = row.place
            elif _is_of_tensors(row) and not any(
                lies_in(leaf, memory) for leaf in tree_flatten(row.before)[0]
            ):
                tensors[key] = row.place
            else:
                replaced[key] = row.place, self._shape(row, place)
        operations = operations_of(self._session) if then.operations is None else then.operations
        things = tuple(self.enclosed.reached)
        return HostAssumptions(
            numbers, tensors, then.read, replaced, grown, things, operations, then.elsewhere
        )

    def _shape(self, row: HostChange, place: Place) -> _Shape:
        return tuple(_shape_of(value, row.place.path, place) for value in row.appended or (row.after,))

    def _refuse_other_changes(self, changes: Sequence[HostChange], place: Place) -> None:
        """Raise `UnsupportedStep` where this run did otherwise than the first."""
        if self._assumed.operations is None:
            return
        found = {row.place.identity: self._shape(row, place) for row in changes}
        wanted = dict(self._assumed.replaced)
        wanted |= {key: (grown.place, grown.shape) for key, grown in self._assumed.grown.items()}
        paths = [held.path for held, _ in wanted.values()]
        other = [
            held.path for key, (held, shape) in wanted.items() if not _is_like(found.get(key, ()), shape)
        ]
        if other or (wanted and operations_of(self._session) != self._assumed.operations):
            raise UnsupportedStep(
                "the first step does something that later ones do not, and changes "
                f"{', '.join(other or paths)}",
                where=place,
                why="what it leaves there decides what the next one does, and one program cannot be both",
                remedy="take one step before the capture, or do the first one's work before it",
            ).in_first_step()

    def _done(self, changes: Sequence[HostChange], place: Place) -> HostOutcome:
        pairs, effects, kept = list[tuple[fx.Node, fx.Node]](), list[HostEffect](), list[PutValue]()
        owned = self._owners().of
        for row in changes:
            _, node = self._inputs.get(row.place.identity, (None, None))
            value = self._session.tensors.held(row.after) if _is_computed(row.after) else None
            if node is not None and value is not None:
                pairs += [(node, value)] if value is not node else []
                continue
            for value in row.appended or (row.after,):
                structure = self._structure(value, row.place.path, kept)
                effects.append(HostEffect(owned(row.place), structure, appends=bool(row.appended)))
        scheduled = self._session.step.scheduling.calls
        refuse_read_by_schedules(scheduled, [row.place for row in changes])
        calls = tuple(
            HostCall(call.path, call.schedule, self._structure((call.args, call.kwargs), call.path, kept))
            for call in scheduled
        )
        scheduled.clear()  # which holds tensors of the run
        refuse_shared_memory(self._session, kept, place)
        counted = (*(self._counted(place, node) for place, node in self._inputs.values()), *self._parts)
        counted = tuple(replace(row, place=owned(row.place)) for row in counted)
        return HostOutcome(tuple(pairs), counted, tuple(effects), calls, tuple(kept))

    def _owners(self) -> Owners:
        """Who has what the step changes; the model and whose method it is stay who they are."""
        subject = self._session.run.subject
        lasting = {id(thing) for _, thing in (*owners_of(subject.call), *subject.named_modules())}
        return Owners(self.enclosed.rows, lasting)

    def _structure(self, value: Any, path: str, kept: list[PutValue]) -> Structure:
        pairs, spec = tree_flatten_with_path(value)
        leaves: list[Named | Constant] = []
        for inner, leaf in pairs:
            node = self._session.tensors.held(leaf)
            if node is None:
                leaves.append(Constant(self._session.step.scheduling.deferred(leaf)))
                continue
            name = f"put_{len(kept)}_{as_name(path)}"
            kept.append(PutValue(name, f"{path}{spelled(inner)}", node))
            leaves.append(Named(name))
        return Structure(spec, tuple(leaves))

    def _counted(self, place: HostPlace, node: fx.Node) -> HostNumber:
        """A number that operators take keeps its type: they give integers for integers."""
        kind = type(self._session.step.counting.known[node]).__name__
        return HostNumber(node.name, place, (kind,) if _reaches_operators(node) else ("int", "float"))


def _is_of_tensors(row: HostChange) -> bool:
    """Whether tensors took the place of others like them, alone or in a container."""
    (then, old), (now, new) = tree_flatten(row.before), tree_flatten(row.after)
    if old != new or not any(isinstance(leaf, Tensor) for leaf in then):
        return False
    return all(_is_like_tensor(*pair) for pair in zip(then, now, strict=True))


def _is_like_tensor(then: Any, now: Any) -> bool:
    if not (type(then) is Tensor and isinstance(now, Tensor)):
        return same_constant(then, now)
    return then.is_leaf and (then.shape, then.dtype, then.device) == (now.shape, now.dtype, now.device)


def _is_computed(value: object) -> bool:
    return is_recorded(value) or type(value) in SYMBOLIC


def _shape_of(value: Any, path: str, place: Place) -> tuple[TreeSpec, _Shape]:
    """What a value is made of: which containers, which constants."""
    leaves, spec = tree_flatten(value)
    for leaf in leaves:
        refuse_read(leaf)
    strange = [leaf for leaf in leaves if not _is_kept(leaf)]
    if strange:
        raise UnsupportedStep(
            f"the step puts a {type(strange[0]).__name__} into {path}",
            where=place,
            why="tensors, numbers and texts are put there again in every run, alone and in containers",
            remedy="do it outside the captured step; where only the first step does it, take one before",
        ).in_first_step()
    return spec, tuple(map(_kind_of, leaves))


def _is_left(row: HostChange, holders: Set[int]) -> bool:
    """Whether one of these holds something now that no program can put there again."""
    if id(row.place.holder) not in holders or not row.is_repeatable:
        return False
    leaves = tree_flatten(row.after)[0]
    return not all(_is_kept(leaf) or type(leaf) is Unread for leaf in leaves)


def _say_left(rows: Sequence[HostChange]) -> None:
    """Warn of what stays on objects of the model as it was."""
    if not rows:
        return
    found = ", ".join(f"a {type(row.after).__name__} in {row.place.path}" for row in rows)
    warnings.warn(
        f"the model leaves {found}, which a program does not repeat: keep tensors, numbers and texts there, "
        "alone or in containers, if code outside of the step reads it",
        stacklevel=2,
    )


def _kind_of(leaf: Any) -> Any:
    if type(leaf) is Later:
        return left_at(leaf)[0]
    if _is_computed(leaf):
        return _NUMBER
    return type(leaf) if isinstance(leaf, Tensor) else leaf


def _is_like(found: _Shape, wanted: _Shape) -> bool:
    """Whether a later run puts there what the first one did, of which counters were no inputs yet."""
    if [spec for spec, _ in found] != [spec for spec, _ in wanted]:
        return False
    now, then = (chain.from_iterable(leaves for _, leaves in shape) for shape in (found, wanted))
    return all(map(_is_leaf_like, now, then))


def _is_leaf_like(now: Any, then: Any) -> bool:
    return bool(now == then) or (now is _NUMBER and type(then) in (int, float))


def _is_kept(leaf: object) -> bool:
    return isinstance(leaf, Tensor | Enum) or _is_computed(leaf) or type(leaf) in (*PLAIN_IN_WHOLE, Later)


def _reaches_operators(node: fx.Node) -> bool:
    """Whether a number, or what Python computes of it, is given to an operator on tensors."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        current = waiting.pop()
        seen.add(current)
        waiting += [user for user in current.users if user not in seen and user.op == "call_function"]
    return any(isinstance(each.meta.get("val"), Tensor) for each in seen)


def _holders(rows: Iterable[Saved], thing: Any) -> Iterator[HostPlace]:
    """Where something is held."""
    return (place for row in rows for place in places_in(row) if place.now() is thing)
