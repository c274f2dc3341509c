"""The log of one capture, and what follows from it so far."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain, count
from operator import attrgetter
from typing import Any

from torch import Tensor, fx
from torch.autograd.graph import Node

from whence._torch.autograd.nodes import GradientKey, sequence_number
from whence.program import InputQuery, ModeQuery, Structure
from whence.provenance import CallSite
from whence.provenance.places import PROGRAM
from whence.schema import Phase
from whence.tracing.log import events
from whence.tracing.log.events import (
    Crossed,
    Drew,
    Event,
    GivenTensor,
    Marked,
    MetComposed,
    Moved,
    Opened,
    Reconsidered,
    Stepped,
    TensorAsked,
)
from whence.tracing.target.loss_state import LossTensor

UNNAMED = "c_lifted_tensor_"
"""How placeholders of tensors begin that nobody has a name for."""


@dataclass(frozen=True, eq=False)
class Log:
    """What follows from all that has happened: events are not kept themselves.

    `add` is all that writes to it; when the capture is over, `forget` lets go of what keeps the run alive.

    `taken` and `given` is what calls take and give, by the numbers of their scopes. `inputs` says of
    placeholders what they are, and `arguments` by identity of which tensors fake ones are twins. `literals`
    are tensors from outside the model by the names of their placeholders, `made` those among them that the
    model made of numbers while it ran, and `of_loss` says by identity what the loss function holds. `lost` is
    what autograd cannot find in a forward-only program. `kept` are the operations that put a gradient into
    the `.grad` of a leaf, each with the identity of that. `keys` says where the gradients of values that
    modules exchange are collected, and `exchanged` are all of those places.
    """

    order: Sequence[fx.Node] = field(default_factory=list)
    marks: Mapping[fx.Node, Marked] = field(default_factory=dict)
    scopes: Sequence[Opened] = field(default_factory=list)
    taken: Mapping[int, Structure] = field(default_factory=dict)
    given: Mapping[int, Structure] = field(default_factory=dict)
    moves: Sequence[Moved] = field(default_factory=list)
    steps: Sequence[Stepped] = field(default_factory=list)
    keys: Mapping[fx.Node, GradientKey] = field(default_factory=dict)
    exchanged: Set[GradientKey] = field(default_factory=set)
    inputs: Mapping[fx.Node, str] = field(default_factory=dict)
    literals: Mapping[str, Tensor] = field(default_factory=dict)
    made: Set[str] = field(default_factory=set)
    of_loss: Mapping[int, LossTensor] = field(default_factory=dict)
    asked: Sequence[TensorAsked] = field(default_factory=list)
    modes: Mapping[str, ModeQuery] = field(default_factory=dict)
    arguments: Mapping[int, GivenTensor] = field(default_factory=dict)
    questions: Mapping[tuple[int, str], InputQuery] = field(default_factory=dict)
    dtypes_asked: Sequence[str] = field(default_factory=list)
    apart: Set[Any] = field(default_factory=set)
    contiguous: Sequence[fx.Node | None] = field(default_factory=list)
    draws: Sequence[fx.Node] = field(default_factory=list)
    redraws: Mapping[fx.Node, fx.Node | None] = field(default_factory=dict)
    unpacked: Sequence[fx.Node] = field(default_factory=list)
    lost: Mapping[str, None] = field(default_factory=dict)
    wholes: Set[int] = field(default_factory=set)
    composed: Sequence[MetComposed] = field(default_factory=list)
    kept: Mapping[fx.Node, int] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Something has happened."""
        _FOLLOWS[type(event)](self, event)

    def fork(self) -> "Log":
        """A log of the same capture, with operations and steps of its own."""
        return replace(self, order=[], steps=[])

    def until(self, end: int, steps: slice) -> "Log":
        """The log as it was when so many operations had been recorded, with these steps alone."""
        return replace(self, order=self.order[:end], steps=self.steps[steps])

    def forget(self) -> None:
        """Let go of autograd's nodes, which lead to every tensor of the run."""
        steps: Any = self.steps
        steps.clear()

    @property
    def sites(self) -> list[CallSite]:
        """Which call each scope is."""
        return [scope.site for scope in self.scopes]

    @property
    def parents(self) -> list[int]:
        """The caller of each scope."""
        return [scope.parent for scope in self.scopes]

    def free_name(self, wanted: str | None) -> str:
        """A name for a tensor from outside that no other input has."""
        numbered = sum(name.startswith(UNNAMED) for name in self.literals)
        first = wanted or f"{UNNAMED}{numbered}"
        names = chain([first], (f"{first}_{number}" for number in count(1)))
        return next(name for name in names if not self._is_taken(name))

    def _is_taken(self, name: str) -> bool:
        return name in self.literals or any(node.name == name for node in self.inputs)

    def scope_of(self, node: Node) -> int:
        """The innermost call that was running when an autograd node was made."""
        number = sequence_number(node)
        if number is None:
            return PROGRAM
        return self.moves[bisect_right(self.moves, number, key=attrgetter("moment")) - 1].scope


# --- what follows from each event ------------------------------------------------------------------------


def _mark(log: Any, event: Marked) -> None:
    log.order.append(event.node)
    log.marks[event.node] = event


def _reconsider(log: Any, event: Reconsidered) -> None:
    log.marks[event.node] = log.marks[event.node]._replace(phase=event.phase)


def _cross(log: Any, event: Crossed) -> None:
    log.keys[event.node] = event.key
    log.exchanged.add(event.key)


def _note_draw(log: Any, event: Drew) -> None:
    log.draws.append(event.node)
    if event.repeats:
        log.redraws[event.node] = event.first


_FOLLOWS: Mapping[type, Callable[[Any, Any], None]] = {
    Marked: _mark,
    Reconsidered: _reconsider,
    Opened: lambda log, event: log.scopes.append(event),
    events.Took: lambda log, event: log.taken.update({event.scope: event.inputs}),
    events.Gave: lambda log, event: log.given.update({event.scope: event.outputs}),
    Moved: lambda log, event: log.moves.append(event),
    Stepped: lambda log, event: log.steps.append(event),
    events.GradientKept: lambda log, event: log.kept.update({event.node: event.leaf}),
    Crossed: _cross,
    events.InputNamed: lambda log, event: log.inputs.update({event.node: event.words}),
    events.Met: lambda log, event: log.literals.update({event.name: event.tensor}),
    events.MadeOfNumbers: lambda log, event: log.made.add(event.name),
    events.LossHolds: lambda log, event: log.of_loss.update(event.tensors),
    TensorAsked: lambda log, event: log.asked.append(event),
    GivenTensor: lambda log, event: log.arguments.update({id(event.twin): event}),
    events.InputQueried: lambda log, event: log.questions.setdefault(event.query.asked, event.query),
    events.ModeQueried: lambda log, event: log.modes.setdefault(event.mode.name, event.mode),
    events.DtypeQueried: lambda log, event: log.dtypes_asked.append(event.line),
    events.TookApart: lambda log, event: log.apart.add(event.composite),
    events.MadeContiguous: lambda log, event: log.contiguous.append(event.node),
    Drew: _note_draw,
    events.Unpacked: lambda log, event: log.unpacked.append(event.node),
    events.Lost: lambda log, event: log.lost.update({event.what: None}),
    events.Announced: lambda log, event: log.wholes.update(event.wholes),
    MetComposed: lambda log, event: log.composed.append(event),
}


# --- what readers of the log ask -------------------------------------------------------------------------


def ran_without(marks: Mapping[fx.Node, Marked], custom: Set[int]) -> Callable[[fx.Node], bool]:
    """Whether gradients stop at a node, because it ran without; `custom` autograd functions excepted."""

    stopped = {
        node for node, mark in marks.items() if mark.cut and not (mark.in_function and mark.moment in custom)
    }
    return stopped.__contains__


def first_of_each_moment(log: Log) -> dict[int, fx.Node]:
    """The operation that made each autograd node: the first recorded after it was made."""
    makers: dict[int, fx.Node] = {}
    for node in log.order:
        mark = log.marks[node]
        if mark.phase is Phase.FORWARD and not mark.packs:
            makers.setdefault(mark.moment, node)
    return makers


def maker_of(node: Node, makers: Mapping[int, fx.Node]) -> fx.Node | None:
    """The operation that an autograd node differentiates."""
    number = sequence_number(node)
    return None if number is None else makers.get(number)
