"""An optimizer that has not taken a step yet: what its first step makes, and whether it is known beforehand.

Adam begins with zeros, and from then on each step is the same: the program of that is wanted, and zeros are
made where there is no state yet. SGD with momentum begins with the gradient itself: its first step is another
program than the second.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from whence._torch.operators.schemas import written_arguments
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.errors import Place, UnsupportedStep
from whence.program.arguments.optimizer_arguments import (
    ATTRIBUTES,
    NUMBER,
    Initial,
    Setting,
    StateFrame,
    StateHome,
    is_number,
)
from whence.tracing.reuse import AnotherAttempt, Reuse
from whence.tracing.steps.counters import Counter, GroupKey, better_guess, first_guess
from whence.tracing.steps.enclosed_state import refuse_changed
from whence.tracing.steps.host.host_run import HostAssumptions
from whence.tracing.steps.host.operations import PASSED_ON, Operations, operations_of
from whence.tracing.steps.optimizer import Key, OptimizerEntry, Optimizing, OwnState, strange_state
from whence.tracing.steps.session import StepSession

aten = torch.ops.aten
_FILLED: Mapping[Any, Any] = {
    **dict.fromkeys((aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default), 0),
    **dict.fromkeys((aten.ones_like.default, aten.ones.default, aten.new_ones.default), 1),
}
_GIVEN = (aten.full.default, aten.full_like.default)
_FIRST = (
    "take a step with the optimizer before the capture, or as many as its state needs to be all there: "
    "from then on every step is the same"
)


@dataclass(frozen=True)
class StepAssumptions:
    """What a run takes for given: state that a first step would make, and whether learning rates are inputs.

    `touched` is where it only looks for some, and leaves an empty one.
    `counts` and `numbers` are numbers that steps advance, in the state and in the groups, `advanced` those in
    containers and objects of the state; `owned` are attributes of the optimizer that it changes. `operations`
    are those of the run before, which this one must repeat. `host` is what the step changes
    around it, `beside` what is known of that at first. A step that `takes_gradients` reads those of before.
    `reuse` says which calls may be replayed.
    """

    created: Mapping[Key, Initial] = field(default_factory=dict)
    touched: frozenset[StateHome] = frozenset()
    counts: Mapping[Key, Counter] = field(default_factory=dict)
    numbers: Mapping[GroupKey, Counter] = field(default_factory=dict)
    advanced: frozenset[Key] = frozenset()
    owned: frozenset[str] = frozenset()
    operations: Operations | None = None
    fixed_rates: bool = False
    takes_gradients: bool = False
    host: HostAssumptions = field(default_factory=HostAssumptions)
    beside: HostAssumptions = field(default_factory=HostAssumptions)
    reuse: Reuse = field(default_factory=lambda: Reuse(joint=True))

    def but_for(self, kind: type | None, why: str) -> "StepAssumptions":
        """The same without calls of one class, or of any; what the step changes around it is found again."""
        return replace(self, reuse=self.reuse.but_for(kind, why), host=self.beside)

    def with_fixed_rates(self) -> "StepAssumptions":
        """From the beginning, with learning rates as constants."""
        held = {"host": self.beside, "beside": self.beside, "reuse": self.reuse}
        return StepAssumptions(fixed_rates=True, takes_gradients=self.takes_gradients, **held)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StateBefore:
    """State that the optimizer had when the run began: what tensors and numbers there were, how a person
    reads each piece, and what other pieces were made of; where it was empty, and whether that is assumed."""

    kinds: Mapping[Key, str]
    pieces: Mapping[Key, str]
    frames: Mapping[Key, StateFrame]
    touched: Mapping[StateHome, bool]


def _unbegun(assumed: StepAssumptions) -> AnotherAttempt:
    """The optimizer made state in this run, or advanced numbers: run again with what is assumed now."""
    return AnotherAttempt(lambda _: assumed, "the optimizer has not taken a step yet")


def refuse_unbegun(
    session: StepSession,
    found: Optimizing,
    before: StateBefore,
    counted: Mapping[GroupKey, Counter],
    assumed: StepAssumptions,
    results: Sequence[Any],
) -> None:
    """Raise `AnotherAttempt` where the optimizer made state or advanced numbers that were no inputs in it.

    `before` is the state that it had, and `counted` such numbers in its groups. Raises `UnsupportedStep`
    where what it made is no constant. `results` are what the step returned.
    """
    UnsupportedStep.refuse(strange_state(found)[:1])
    expected = assumed.operations
    advanced = _advanced_inside(found, before, Place(None, session.run.subject.place.line))
    if not advanced <= assumed.advanced:
        raise _unbegun(replace(assumed, advanced=assumed.advanced | advanced))
    new = [held for held in found.entries(assumed.advanced) if held.place not in before.kinds]
    touched = frozenset(found.touched()) - before.touched.keys()
    begins = bool(new or touched) or any(counter.after is not None for counter in counted.values())
    if begins and expected is not None:
        paths = [*(held.path for held in new), *(home.path for home in touched)]
        raise _refused(", ".join(paths) or "values in its groups")
    numbers = {**assumed.numbers, **counted}
    if begins:
        created, counts, makers = _created(session, new)
        operations = (*operations_of(session, makers), *_left(session, found, results))
        begun = replace(assumed, created=created, counts=counts, touched=touched)
        raise _unbegun(replace(begun, numbers=numbers, operations=operations))
    if counted:
        raise _unbegun(replace(assumed, numbers=numbers))
    _guess_again(session, found, assumed)


def _advanced_inside(found: Optimizing, before: StateBefore, where: Place) -> frozenset[Key]:
    """Numbers in containers and objects of the state that the step changed; raises `UnsupportedStep` where it
    changed other parts of such state, or took some away."""
    now = {row.place: row for row in found.pieces()}
    made = [now[place].path for place in found.frames().keys() - before.frames.keys()]
    made += [row.path for place, row in now.items() if before.kinds.get(place, row.kind) != row.kind]
    gone = [path for place, path in before.pieces.items() if place not in now]
    changed = [
        (place, part)
        for place, frame in before.frames.items()
        if place in now
        for part in frame.other_parts(now[place].value)
    ]
    ways = {place: {way for way, *_ in frame.rows} for place, frame in before.frames.items()}
    made += [before.pieces[place] + part.spelled for place, part in changed if part.way not in ways[place]]
    gone += [before.pieces[place] + part.spelled for place, part in changed if part.kind != NUMBER]
    if made:
        raise _refused(", ".join(made))
    refuse_changed(gone, where)
    return frozenset((home, (*key, *part.way)) for (home, key), part in changed)


def refuse_changes_of_its_own(
    kept: Iterable[OwnState], found: Optimizing, assumed: StepAssumptions, where: Place
) -> None:
    """Raise `AnotherAttempt` where the step changed attributes of the optimizer that may be state, and
    `UnsupportedStep` for other things that it changed there."""
    changes = [row for held in kept for row in held.changes()]
    now = found.beside if isinstance(found.optimizer, Optimizer) else {}
    known = {
        ".".join((*row.home.member, row.way[0])) for row in found.pieces() if row.home.owner == ATTRIBUTES
    }
    possible = replace(found, owned=frozenset(now))
    new = {key for key, _ in changes if key in now and key not in known and possible.is_owned(key, now[key])}
    refuse_changed((path for key, path in changes if key not in new | known), where)
    if new:
        raise _unbegun(replace(assumed, owned=assumed.owned | new))


def _created(
    session: StepSession, new: Sequence[OptimizerEntry]
) -> tuple[dict[Key, Initial], dict[Key, Counter], set[fx.Node]]:
    """What state is made of, the numbers in it, and the nodes that made it."""
    created: dict[Key, Initial] = {}
    counts: dict[Key, Counter] = {}
    makers: set[fx.Node] = set()
    for held in new:
        if held.is_inside or is_composed(held.value):
            raise _refused(held.path)
        chain = _history(session, held)
        initial = _initial(session, held, chain)
        if initial is None:
            raise _refused(held.path)
        created[held.place] = initial
        makers |= {*chain[-1:], *(node for node in chain if node.target in PASSED_ON)}
        if is_number(held.value):
            counts[held.place] = first_guess(initial.value)
    return created, counts, makers


def _guess_again(session: StepSession, found: Optimizing, assumed: StepAssumptions) -> None:
    """Raise `AnotherAttempt` where numbers begin with others than was assumed, and `UnsupportedStep` where
    with none that is known."""
    now = found_numbers(found)

    def better(counters: Mapping[Any, Counter], paths: Mapping[Any, str]) -> dict[Any, Counter]:
        return {place: _better(counter, paths[place], now, session) for place, counter in counters.items()}

    counts = better(assumed.counts, {held.place: held.path for held in found.entries(assumed.advanced)})
    numbers = better(assumed.numbers, {place: Setting(*place, None).path for place in assumed.numbers})
    if (counts, numbers) != (assumed.counts, assumed.numbers):
        raise _unbegun(replace(assumed, counts=counts, numbers=numbers))


def _better(counter: Counter, path: str, now: Mapping[str, Any], session: StepSession) -> Counter:
    if counter.after is None:
        return counter
    guess = better_guess(counter, path, now[path], session.step.counting)
    if guess is None:
        raise _refused(path)
    return guess


def found_numbers(found: Optimizing) -> dict[str, Any]:
    """What numbers the optimizer holds now, by their paths."""
    rows = [(row.path, row.value) for row in found.entries(None)]
    rows += [(row.path, row.value) for row in found.settings()]
    return {path: value for path, value in rows if is_number(value)}


def _refused(what: str) -> UnsupportedStep:
    return UnsupportedStep(
        f"the optimizer's first step makes {what} of something else than a constant",
        why="the first step is another program than all that follow",
        remedy=_FIRST,
    ).in_first_step()


def _left(session: StepSession, found: Optimizing, results: Sequence[Any]) -> Operations:
    """The plain values that are known of what a step returns, and of what it leaves in the groups."""
    value = session.step.counting.value
    plain = [each for each in results if is_number(each) or type(each) in (bool, str)]
    settings = tuple((row.path, value(row.value)) for row in found.settings() if is_number(row.value))
    return ("returned", tuple(value(each) if is_number(each) else each for each in plain)), ("left", settings)


def refuse_another_first_step(
    session: StepSession, found: Optimizing, expected: Operations | None, results: Sequence[Any]
) -> None:
    """Raise `UnsupportedStep` where the step does not compute what the first one did."""
    done = (*operations_of(session), *_left(session, found, results))
    if expected is not None and done != expected:
        raise UnsupportedStep(
            f"the first step of {type(found.optimizer).__name__} does something that later ones do not",
            why="one program cannot be both",
            remedy=_FIRST,
        ).in_first_step()


def _initial(session: StepSession, held: OptimizerEntry, history: Sequence[fx.Node]) -> Initial | None:
    """What a piece of state was made as, if all its elements are one number."""
    if is_number(held.value):
        value = session.step.counting.value(held.value)
        return None if value is None else Initial(value)
    if not history:
        return Initial(held.value)
    node = history[-1]
    like = node.meta["val"]
    if node.target in _FILLED:
        return Initial(_FILLED[node.target], like)
    if node.target in _GIVEN and isinstance(node.args[1], (bool, int, float)):
        return Initial(node.args[1], like)
    literal = session.log.literals.get(node.name)
    if literal is None or literal.numel() != 1 or node.name not in session.log.made:
        return None
    return Initial(literal.item(), like)


def _history(session: StepSession, held: OptimizerEntry) -> list[fx.Node]:
    """The nodes that a tensor was written by, the last one first; the last is the one that made it."""
    if not isinstance(held.value, Tensor):
        return []
    found = [session.tensors.known(held.value)]
    while (before := _before(found[-1])) is not None:
        found.append(before)
    return found


def _before(node: fx.Node) -> fx.Node | None:
    """The tensor that an operation wrote in place, or passed on as it was."""
    if node.target in PASSED_ON:
        first = node.args[0]
        return first if isinstance(first, fx.Node) else None
    written = written_arguments(node.target, node.args, node.kwargs)
    return written[0] if written and isinstance(written[0], fx.Node) else None
