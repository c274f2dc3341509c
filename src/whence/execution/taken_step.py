"""A training step that has been taken once, for real: what there is from the second one on.

Some steps begin with another program than they go on with: momentum that is the first gradient, a mean that
the first batch makes. Whoever wants the program of all others takes one before, and gives everything back.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from whence._torch.observe.training_steps import as_one_optimizer
from whence.dependence.asking import Failed, attempt
from whence.dependence.tensor_facts import facts_of
from whence.execution.running import same_start, take
from whence.execution.verify_step import optimizer_kept
from whence.program import FlatProgram
from whence.program.arguments.variants import with_variants
from whence.schema import InputKind
from whence.tracing.steps.enclosed_state import Enclosed, enclosed_by, without_tuples
from whence.tracing.steps.optimizer import optimizing
from whence.tracing.target.subject import Subject, loose_tensors, step_subject, tensors_by_name

P = TypeVar("P", bound=FlatProgram)


@dataclass(frozen=True)
class TakenStep:
    """What a first step `made` around itself, where the model had tensors of these names `before` it."""

    made: list[Tensor]
    before: Mapping[str, Tensor]

    def given_back(self, program: P, first: Exception) -> P:
        """A program of later steps over the buffers of before; raises `first` where it is over other tensors
        that the step has made, which another first step would make anew."""
        return with_variants(program, lambda each: self._given_back(each, first))

    def _given_back(self, program: P, first: Exception) -> P:
        ours = set(map(id, self.made))
        rows = program.signature.inputs_of(InputKind.BUFFER)
        buffers = {row.name: self.before.get(row.path) for row in rows}
        state = dict(program.state)
        for name in (name for name, tensor in program.state.items() if id(tensor) in ours):
            then = buffers.get(name)
            if then is None or facts_of(then) != facts_of(state[name]):
                raise first
            state[name] = then
        return program.with_changes(state=state)


@contextmanager
def step_taken(
    step: Callable[..., Any],
    inputs: tuple[Any, Any],
    model: object,
    optimizer: object,
    instead: Exception | None = None,
) -> Iterator[TakenStep]:
    """The step has run once on copies of these inputs while the block runs; all is as before afterwards.

    A step for another device may not run here, and what is raised `instead` of its own error says so.
    """
    subject = step_subject(step, model)
    enclosed, named = enclosed_by(step), tensors_by_name(subject)
    before = _reachable_tensors(enclosed, subject)
    found = optimizing(subject, as_one_optimizer(optimizer))
    with same_start(subject, inputs, [*before.values()]) as given, optimizer_kept(found):
        taken = None
        try:
            taken = attempt(partial(take, step, *given))
            if isinstance(taken, Failed):
                raise instead or taken.error
            now = _reachable_tensors(enclosed_by(step), step_subject(step, model))
            yield TakenStep([tensor for key, tensor in now.items() if key not in before], named)
        finally:
            del taken, instead  # or what is raised would hold this frame, which holds it
            enclosed.restore()


def _reachable_tensors(enclosed: Enclosed, subject: Subject) -> dict[int, Tensor]:
    """The tensors that a step leads to, or that its model holds as plain attributes, by identity; all of
    what leads there is looked at from now on."""
    enclosed.look_everywhere()
    values = (value for row in (*enclosed.rows, *enclosed.theirs) for value in without_tuples(row.held()))
    around = [tensor for value in values for tensor in _tensors_of(value)]
    return {id(tensor): tensor for tensor in (*around, *(held for _, held in loose_tensors(subject)))}


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """A tensor around a step, or those of a module there."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
