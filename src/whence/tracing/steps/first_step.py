"""An optimizer that has not taken a step yet: what its first step makes, and whether it is known beforehand.

Adam begins with zeros, and from then on each step is the same: the program of that is wanted, and zeros are
made where there is no state yet. SGD with momentum begins with the gradient itself: its first step is another
program than the second.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import written_arguments
from whence.errors import Fault, UnsupportedStep
from whence.program.arguments.optimizer_arguments import Initial, Setting
from whence.schema import Phase
from whence.tracing.steps.assumptions import StepAssumptions
from whence.tracing.steps.counters import Counter, GroupKey, better_guess, first_guess, is_number
from whence.tracing.steps.host.operations import PASSED_ON, Operations, operations_of
from whence.tracing.steps.optimizer import Key, OptimizerEntry, Optimizing
from whence.tracing.steps.session import StepSession

aten = torch.ops.aten
_FILLED: Mapping[Any, Any] = {
    **dict.fromkeys((aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default), 0),
    **dict.fromkeys((aten.ones_like.default, aten.ones.default, aten.new_ones.default), 1),
}
_GIVEN = (aten.full.default, aten.full_like.default)
_FIRST = "take one step with the optimizer before the capture: from then on every step is the same"


class Unbegun(Exception):
    """The optimizer made state in this run, or advanced numbers: run again with what is assumed now."""

    def __init__(self, assumed: StepAssumptions) -> None:
        super().__init__("the optimizer has not taken a step yet")
        self.assumed = assumed


def refuse_unbegun(
    session: StepSession,
    found: Optimizing,
    before: Set[Key],
    counted: Mapping[GroupKey, Counter],
    assumed: StepAssumptions,
) -> None:
    """Raise `Unbegun` where the optimizer made state or advanced numbers that were no inputs in this run.

    `before` is the state that it had, and `counted` such numbers in its groups. Raises `UnsupportedStep`
    where what it made is no constant.
    """
    _refuse_values(found)
    expected = assumed.operations
    new = [held for held in found.held() if held.place not in before]
    begins = bool(new) or any(counter.after is not None for counter in counted.values())
    if begins and expected is not None:
        raise _refused(", ".join(held.path for held in new) or "values in its groups")
    numbers = {**assumed.numbers, **counted}
    if begins:
        created, counts, makers = _created(session, new)
        operations = operations_of(session, makers, Phase.OPTIMIZER)
        raise Unbegun(
            replace(assumed, created=created, counts=counts, numbers=numbers, operations=operations)
        )
    if counted:
        raise Unbegun(replace(assumed, numbers=numbers))
    _guess_again(session, found, assumed)


def _created(
    session: StepSession, new: Sequence[OptimizerEntry]
) -> tuple[dict[Key, Initial], dict[Key, Counter], set[fx.Node]]:
    """What state is made of, the numbers in it, and the nodes that made it."""
    created: dict[Key, Initial] = {}
    counts: dict[Key, Counter] = {}
    makers: set[fx.Node] = set()
    for held in new:
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
    """Raise `Unbegun` where numbers begin with others than was assumed, and `UnsupportedStep` where with none
    that is known."""
    now = found_numbers(found)

    def better(counters: Mapping[Any, Counter], paths: Mapping[Any, str]) -> dict[Any, Counter]:
        return {place: _better(counter, paths[place], now, session) for place, counter in counters.items()}

    counts = better(assumed.counts, {held.place: held.path for held in found.held()})
    numbers = better(assumed.numbers, {place: Setting(*place, None).path for place in assumed.numbers})
    if (counts, numbers) != (assumed.counts, assumed.numbers):
        raise Unbegun(replace(assumed, counts=counts, numbers=numbers))


def _better(counter: Counter, path: str, now: Mapping[str, Any], session: StepSession) -> Counter:
    if counter.after is None:
        return counter
    guess = better_guess(counter, path, now[path], session.step.counting)
    if guess is None:
        raise _refused(path)
    return guess


def found_numbers(found: Optimizing) -> dict[str, Any]:
    """What numbers the optimizer holds now, by their paths."""
    rows = [(row.path, row.value) for row in found.held()]
    rows += [(row.path, row.value) for row in found.settings()]
    return {path: value for path, value in rows if is_number(value)}


def _refused(what: str) -> UnsupportedStep:
    return UnsupportedStep(
        f"the optimizer's first step makes {what} of something else than a constant",
        why="the first step is another program than all that follow",
        remedy=_FIRST,
    ).in_first_step()


def _refuse_values(found: Optimizing) -> None:
    values = [
        row
        for row in found.held()
        if not (isinstance(row.value, (Tensor, type(None))) or is_number(row.value))
    ]
    if values:
        raise UnsupportedStep.of(
            Fault(
                f"the optimizer keeps {row.path} as a {type(row.value).__name__}",
                why="a program changes tensors and numbers, and no other values of Python's",
                remedy="use an optimizer that keeps its state in tensors, as those of torch.optim do; or "
                "capture the model with backward=loss and let the optimizer run by itself",
            )
            for row in values[:1]
        )


def refuse_another_first_step(session: StepSession, found: Optimizing, expected: Operations | None) -> None:
    """Raise `UnsupportedStep` where the optimizer does not compute what its first step did."""
    if expected is not None and operations_of(session, set(), Phase.OPTIMIZER) != expected:
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
    if node.op != "call_function":
        return None
    written = written_arguments(node.target, node.args, node.kwargs)
    return written[0] if written and isinstance(written[0], fx.Node) else None
