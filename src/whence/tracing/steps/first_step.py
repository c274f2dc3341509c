"""An optimizer that has not taken a step yet: what its first step makes, and whether it is known beforehand.

Adam begins with zeros, and from then on each step is the same: the program of that is wanted, and zeros are
made where there is no state yet. SGD with momentum begins with the gradient itself: its first step is another
program than the second.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import op_name, written_arguments
from whence.errors import Fault, UnsupportedStep
from whence.program.arguments.optimizer_arguments import Initial
from whence.schema import Phase
from whence.tracing.steps.optimizer import Key, OptimizerEntry, Optimizing
from whence.tracing.steps.session import StepSession

aten = torch.ops.aten
_FILLED: Mapping[Any, Any] = {
    **dict.fromkeys((aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default), 0),
    **dict.fromkeys((aten.ones_like.default, aten.ones.default, aten.new_ones.default), 1),
}
_PASSED_ON = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
_GIVEN = (aten.full.default, aten.full_like.default)
_FIRST = "take one step with the optimizer before the capture: from then on every step is the same"


class Unbegun(Exception):
    """The optimizer made its state in this run: run again with that state, and expect these operations."""

    def __init__(self, created: Mapping[Key, Initial], operations: tuple[str, ...]) -> None:
        super().__init__("the optimizer has not taken a step yet")
        self.created = created
        self.operations = operations


def refuse_unbegun(
    session: StepSession, found: Optimizing, before: Set[Key], expected: tuple[str, ...] | None
) -> None:
    """Raise `Unbegun` where the optimizer made state, and `UnsupportedStep` where that is no constant.

    `before` is the state that it had, and `expected` what it computed in the run that found that out.
    """
    _refuse_numbers(found)
    new = [held for held in found.held() if held.place not in before]
    if not new:
        _refuse_otherwise(session, found, expected)
        return
    created: dict[Key, Initial] = {}
    makers: set[fx.Node] = set()
    for held in new:
        chain = _history(session, held)
        initial = _initial(session, held, chain)
        if initial is None or expected is not None:
            raise _refused(held)
        created[held.place] = initial
        makers |= {*chain[-1:], *(node for node in chain if node.target in _PASSED_ON)}
    raise Unbegun(created, _operations(session, makers))


def _refused(held: OptimizerEntry) -> UnsupportedStep:
    return UnsupportedStep(
        f"the optimizer's first step makes {held.path} of something else than a constant",
        why="the first step is another program than all that follow",
        remedy=_FIRST,
    )


def _refuse_numbers(found: Optimizing) -> None:
    numbers = [row for row in found.held() if not isinstance(row.value, (Tensor, type(None)))]
    if numbers:
        raise UnsupportedStep.of(
            Fault(
                f"the optimizer keeps {row.path} as a {type(row.value).__name__}",
                why="a program changes tensors, and no values of Python's",
                remedy="use an optimizer that keeps its state in tensors, as those of torch.optim do; or "
                "capture the model with backward=loss and let the optimizer run by itself",
            )
            for row in numbers[:1]
        )


def _refuse_otherwise(session: StepSession, found: Optimizing, expected: tuple[str, ...] | None) -> None:
    if expected is not None and _operations(session, set()) != expected:
        raise UnsupportedStep(
            f"the first step of {type(found.optimizer).__name__} does something that later ones do not",
            why="one program cannot be both",
            remedy=_FIRST,
        )


def _operations(session: StepSession, without: set[fx.Node]) -> tuple[str, ...]:
    """What the optimizer computes, in order."""
    marks = session.notes.marks
    return tuple(
        op_name(node.target)
        for node in session.notes.order
        if marks[node].phase is Phase.OPTIMIZER and node not in without
    )


def _initial(session: StepSession, held: OptimizerEntry, history: Sequence[fx.Node]) -> Initial | None:
    """What a piece of state was made as, if all its elements are one number."""
    if not history:
        return Initial(held.value)
    node = history[-1]
    like = node.meta["val"]
    if node.target in _FILLED:
        return Initial(_FILLED[node.target], like)
    if node.target in _GIVEN and isinstance(node.args[1], (bool, int, float)):
        return Initial(node.args[1], like)
    literal = session.notes.literals.get(node.name)
    if literal is None or literal.numel() != 1 or node.name not in session.notes.made:
        return None
    return Initial(literal.item(), like)


def _history(session: StepSession, held: OptimizerEntry) -> list[fx.Node]:
    """The nodes that a tensor was written by, the last one first; the last is the one that made it."""
    if not isinstance(held.value, Tensor):
        return []
    found = [session.known(held.value)]
    while (before := _before(found[-1])) is not None:
        found.append(before)
    return found


def _before(node: fx.Node) -> fx.Node | None:
    """The tensor that an operation wrote in place, or passed on as it was."""
    if node.target in _PASSED_ON:
        first = node.args[0]
        return first if isinstance(first, fx.Node) else None
    if node.op != "call_function":
        return None
    written = written_arguments(node.target, node.args, node.kwargs)
    return written[0] if written and isinstance(written[0], fx.Node) else None
