"""Schedules inside a step: Python that computes with numbers alone, and that a bound step runs as it is.

In the capture they do not run. What they would have moved gets a stand-in until the step is over, so that
nothing of the step can follow from it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from whence._torch.observe.attribute_reads import has_attributes, own_attributes
from whence._torch.observe.training_steps import moved_by, schedules_in
from whence.dependence.snapshots import CONTAINERS, VARIABLE, values_of
from whence.errors import Place, UnsupportedStep
from whence.program.arguments.host_state import HostPlace, Owner
from whence.program.calls import Deferred
from whence.tracing.steps.enclosed_state import variables_of
from whence.tracing.steps.host.stand_ins import Later, Unread, left_at, refuse_read

_MOVED = ("lr", "betas", "momentum")
_DEEP = 6


@dataclass(frozen=True)
class Scheduled:
    """A call of a schedule's `step`, and where it was made."""

    schedule: LRScheduler
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Place

    @property
    def path(self) -> str:
        """How a person reads it."""
        return f"{type(self.schedule).__name__}.step()"


@dataclass
class Scheduling:
    """The calls of schedules in a run, and the ways back from the stand-ins."""

    calls: list[Scheduled] = field(default_factory=list)
    _ways: list[Callable[[], None]] = field(default_factory=list)
    _moved: dict[int, list[str]] = field(default_factory=dict)

    def read(self, place: HostPlace, number: Any) -> None:
        """The step reads what a schedule has there, which is `number` while it runs.

        A row of rates is exchanged as a whole: who got it keeps it.
        """
        at = place if place.owner is None else place.owner.places[0]
        self._ways.append(at.way_back())
        rates = enumerate(at.now()) if at is not place else ()
        at.put([number if key == place.key else held for key, held in rates] if rates else number)

    def meet(self, path: str, schedule: LRScheduler, ask: Callable[[Sequence[HostPlace]], Exception]) -> None:
        """The step comes to a schedule, whose numbers no run finds as they are now: it may `ask` for them."""
        for inner in schedules_in(schedule):
            for places in _numbers_of(path, inner, self._moved_by(inner)):
                for place in places if all(type(each.now()) in (int, float) for each in places) else ():
                    self.read(place, Unread(place.path, lambda _, places=places: ask(places)))  # type: ignore[misc]

    def note(self, call: Scheduled, refuse: Callable[[str], Exception]) -> None:
        """A schedule is called: what it moves is not to be read until the step is over."""
        self.calls.append(call)
        for schedule in schedules_in(call.schedule):
            for group, owner in _groups_of(schedule.optimizer):
                self._hide([HostPlace(f"{key!r} of its group", group, key, owner) for key in _MOVED], refuse)
            held, kind = own_attributes(schedule), type(schedule).__name__
            moved = self._moved_by(schedule)
            self._hide([HostPlace(f"{kind}.{key}", held, key) for key in moved], refuse)

    def _moved_by(self, schedule: LRScheduler) -> list[str]:
        """What its steps may move, of which numbers that stand-ins are there for."""
        return self._moved.setdefault(id(schedule), moved_by(schedule))

    def _hide(self, places: list[HostPlace], refuse: Callable[[str], Exception]) -> None:
        for place in places:
            if place.key in place.holder:
                self._ways.append(place.way_back())
                held, number = place.now(), len(self.calls)
                place.put(
                    [Later(place.path, refuse, Deferred(place, at), number) for at in range(len(held))]
                    if type(held) is list
                    else Later(place.path, refuse, Deferred(place), number)
                )

    def deferred(self, value: Any) -> Any:
        """What a run leaves in the place of what a schedule moves, if that is the last that does; else the
        value."""
        refuse_read(value)
        if type(value) is not Later:
            return value
        at, left, number = left_at(value)
        if number != len(self.calls):
            raise UnsupportedStep(
                f"the step hands on {at} and calls another schedule after it",
                where=self.calls[number].place,
                why="a bound step calls schedules when all else is done, and sees what the last one leaves",
                remedy="read it when all of them have been called; or call them after the captured step",
            )
        return left

    def finish(self, *, fixed_rates: bool) -> None:
        """The step is over; raises `UnsupportedStep` where it is of one learning rate only."""
        self.undo()
        for call in self.calls if fixed_rates else ():
            raise UnsupportedStep(
                f"{call.path} moves the learning rate, and its number is needed in Python",
                where=call.place,
                why="a fused kernel, a branch or a text wants it, and the next step has another",
                remedy="use the optimizer with fused=False, or a tensor as its rate; read the rate outside",
            )

    def undo(self) -> None:
        """Give back what was there."""
        while self._ways:
            self._ways.pop()()


def _numbers_of(path: str, schedule: LRScheduler, moved: Sequence[str]) -> Iterator[list[HostPlace]]:
    """Where a schedule keeps numbers that its steps may move; rates that lie in one row together."""
    held = own_attributes(schedule)
    for key in moved:
        place, value = HostPlace(f"{path}.{key}", held, key), held[key]
        if type(value) is not list:
            yield [place]
            continue
        owner = Owner(value, (place,))
        yield [HostPlace(f"{place.path}[{at}]", value, at, owner) for at in range(len(value))]


def _groups_of(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Owner]]:
    """The groups, each with what holds it: `load_state_dict` puts others there."""
    groups = optimizer.param_groups
    held = Owner(groups, (HostPlace("param_groups", own_attributes(optimizer), "param_groups"),))
    for number, group in enumerate(groups):
        yield group, Owner(group, (HostPlace(f"param_groups[{number}]", groups, number, held),))


def refuse_read_by_schedules(calls: list[Scheduled], changed: list[HostPlace]) -> None:
    """Raise `UnsupportedStep` where a schedule's own functions reach what the step changes: a bound step
    calls schedules last."""
    for call in calls:
        reached = {*_places_reached(call.schedule, _DEEP)} if changed else set()
        if read := [place.path for place in changed if reached & {place.identity, (id(place.holder), None)}]:
            raise UnsupportedStep(
                f"{type(call.schedule).__name__} reaches {', '.join(read)}, which the step changes",
                where=call.place,
                why="a bound step calls schedules when all else is done, and eager where they stand",
                remedy="call the schedule after the captured step",
            )


def _places_reached(value: Any, deep: int) -> Iterator[tuple[int, Any]]:
    """The places that something leads to, by identity: variables of functions, objects, containers."""
    if isinstance(value, Tensor | nn.Module | Optimizer | type) or deep == 0:
        return
    if isinstance(value, MethodType):
        yield from _places_reached(value.__self__, deep - 1)
        value = value.__func__
    if isinstance(value, FunctionType):
        for row in variables_of(value):
            named = row.kind is VARIABLE
            yield (id(row.thing.namespace), row.thing.name) if named else (id(row.thing), None)
            yield from _places_reached(row.before, deep - 1)
    elif isinstance(value, CONTAINERS):
        yield id(value), None
        for inner in values_of(value):
            yield from _places_reached(inner, deep - 1)
    elif has_attributes(value):
        yield id(own_attributes(value)), None
        for inner in own_attributes(value).values():
            yield from _places_reached(inner, deep - 1)
