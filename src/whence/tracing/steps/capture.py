"""Capture a training step, step by step."""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whence._torch.observe.hooks import hooks_on_gradient
from whence._torch.subclasses.fully_sharded import is_sharded, name_of_class
from whence.dependence.observed import Observed
from whence.errors import UnsupportedStep
from whence.program import FlatProgram
from whence.program.arguments.host_state import HostPlace
from whence.program.wellformed import check
from whence.schema import InputKind, OutputKind
from whence.tracing.answers import Answers
from whence.tracing.assembling.assemble import finished
from whence.tracing.attempt import attempted
from whence.tracing.decisions import DECIDES
from whence.tracing.elsewhere import recorded_there
from whence.tracing.recording.partial import keeping_what_was_recorded
from whence.tracing.reuse import Reuse, until_it_holds
from whence.tracing.sandbox.undo import Interrupts
from whence.tracing.steps.attribution import attribute_step
from whence.tracing.steps.enclosed_state import begin_scales, refuse_scalers, scales_of
from whence.tracing.steps.first_step import StepAssumptions
from whence.tracing.steps.host.host_run import HostAssumptions
from whence.tracing.steps.host.of_model import without_host
from whence.tracing.steps.optimizer import Optimizing, optimizing, state_there
from whence.tracing.steps.run import record_step
from whence.tracing.steps.session import StepSession
from whence.tracing.target.eligibility import refuse_inference_mode, refuse_uninitialised
from whence.tracing.target.elsewhere import captured_for_device
from whence.tracing.target.example import Example, Given, example_of
from whence.tracing.target.fully_sharded import refuse_sharding
from whence.tracing.target.subject import Subject, step_subject
from whence.tracing.variants import captured_for_sizes

HOOKED = "parameters have gradient hooks, which run between autograd's nodes"
"""Why calls are not replayed."""


def capture_step(
    step: Callable[..., Any],
    given: Given,
    model: object,
    optimizer: object,
    *,
    reuse: bool = True,
    moved: Sequence[HostPlace] = (),
) -> tuple[FlatProgram, Observed]:
    """The program of a training step on these example inputs, and what the model read.

    Other ways that it goes have `moved` what is at these places.

    A run may find out that it must be done again: with the state that the optimizer makes in its first step,
    with the learning rate as a constant, or without replaying calls.
    """

    def once(answers: Answers, given: Given) -> tuple[FlatProgram, Observed]:
        wanted = Reuse(reuse, joint=True, answers=answers).but_where(given.decide, DECIDES)
        beside = HostAssumptions.beside(moved)
        wish = StepAssumptions(reuse=wanted, host=beside, beside=beside)
        return until_it_holds(wish, partial(_attempted, step, given, model, optimizer))

    return captured_for_device(given, lambda given: captured_for_sizes(given, once))


def _attempted(
    step: Callable[..., Any], given: Given, model: object, optimizer: object, wish: StepAssumptions
) -> tuple[FlatProgram, Observed]:
    def run(interrupts: Interrupts) -> tuple[FlatProgram, Observed, StepSession]:
        subject = step_subject(step, model)
        found = replace(optimizing(subject, optimizer), owned=wish.owned)

        def record(given: Given) -> tuple[FlatProgram, Observed, StepSession]:
            return _captured(subject, example_of(subject, given), found, interrupts, wish)

        if given.elsewhere is not None:
            refuse_scalers(subject.call)
        return recorded_there(given, subject, state_there(found), record)

    return attempted(given, run)


def _captured(
    subject: Subject, example: Example, found: Optimizing, interrupts: Interrupts, wish: StepAssumptions
) -> tuple[FlatProgram, Observed, StepSession]:
    refuse_inference_mode(subject.name)
    refuse_uninitialised(subject)
    begin_scales(subject.call, next((row.tensor.device for row in subject.state), torch.device("cpu")))
    refuse_sharding(subject, differentiates=True)
    _refuse_managed(subject)
    _refuse_history(example)
    if any(hooks_on_gradient(row.tensor) for row in subject.state):
        wish = replace(wish, reuse=wish.reuse.but_for(None, HOOKED))
    recorded = record_step(subject, example, found, interrupts, wish)
    session = recorded.session
    with session.ended_by_errors(), keeping_what_was_recorded(session):
        gradients = attribute_step(recorded, session.step)
        program = finished(example, recorded, gradients).with_changes(step=recorded.step)
        around = {id(row.value) for row, _ in recorded.outside}
        _refuse_outside(program, around | {id(tensor) for tensor in scales_of(subject.call)})
    check(program)
    observed = session.run.reads.observed(row.value for row, _ in recorded.outside)
    observed = replace(observed, call=subject.roots[0][1])
    observed = without_host(observed, recorded.step.places)
    return program, replace(observed, variables=(*observed.variables, *recorded.outside)), session


def _refuse_managed(subject: Subject) -> None:
    managed = [(path, module) for path, module in subject.named_modules() if is_sharded(module)]
    if managed:
        path, module = managed[0]
        raise UnsupportedStep(
            f"FSDP manages {path or '(root)'} ({name_of_class(module)})",
            why="the program of a model has the whole parameters, and the optimizer has the shards of them",
            remedy="capture the step before fully_shard; or capture the model with backward=loss, and let "
            "the optimizer run by itself",
        )


def _refuse_history(example: Example) -> None:
    pairs = zip(example.paths, example.leaves, strict=True)
    made = [path for path, leaf in pairs if isinstance(leaf, Tensor) and not leaf.is_leaf]
    if made:
        raise UnsupportedStep(
            f"{', '.join(made)} came of other tensors that require a gradient",
            why="the backward of the step would go on through what made them, outside of the program",
            remedy="detach them, or compute them in the step",
        )


def _refuse_outside(program: FlatProgram, known: Set[int]) -> None:
    """Tensors that are in no module, or in one only as an attribute, may be read; those around the step, of
    which every run looks whether they are still there, are written, too."""
    rows = program.signature.outputs_of(OutputKind.MUTATION)
    names = {row.name for row in program.signature.inputs_of(InputKind.CONSTANT)}
    constants = [row for row in rows if row.of in names]
    written = [row.path for row in constants if id(program.state[row.of or ""]) not in known]
    if written:
        raise UnsupportedStep(
            f"the step writes {', '.join(written)}, which is neither a parameter nor a buffer of the model",
            why="whoever runs the program on another model would write to the captured tensor",
            remedy="register it as a buffer, or pass a model that holds it: nn.ModuleDict of both models",
        )
