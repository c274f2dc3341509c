"""Capture a training step, step by step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from whence._torch.annotations import annotations_restored
from whence._torch.composed import is_composed
from whence._torch.hooks import gradient_hooks
from whence._torch.modes import modes_restored
from whence._torch.patching import patches_undone
from whence._torch.sizes import undecided_bookkeeping
from whence.errors import UnsupportedHook, UnsupportedStep
from whence.program import Program
from whence.program.known import known_of
from whence.program.observed import Observed
from whence.program.wellformed import check
from whence.schema import InputKind, OutputKind
from whence.tracing.assemble import assemble
from whence.tracing.branch_origins import attribute_branches
from whence.tracing.example import Example, Given, example_of
from whence.tracing.functional import functionalize
from whence.tracing.interrupts import Interrupts
from whence.tracing.kinds import refuse_uninitialised
from whence.tracing.partial import keeping_what_was_recorded
from whence.tracing.replay.expand import expand
from whence.tracing.replay.reuse import Reuse
from whence.tracing.replay.template import Doubt
from whence.tracing.session import Session
from whence.tracing.settling import with_sizes
from whence.tracing.sharding import refuse_sharding
from whence.tracing.sideeffects import warn_about_kept
from whence.tracing.steps.attribution import attribute_step
from whence.tracing.steps.beginning import Unbegun
from whence.tracing.steps.optimizer import Optimizing, optimizing
from whence.tracing.steps.record import Wish, record_step
from whence.tracing.steps.session import RateRead, StepSession
from whence.tracing.subject import Subject, state_tensors, step_subject
from whence.tracing.turns import take_turn
from whence.tracing.undoing import Undoing


def capture_step(
    step: Callable[..., Any], given: Given, model: object, optimizer: object, *, reuse: bool = True
) -> tuple[Program, Observed]:
    """The program of a training step on these example inputs, and what the model read.

    A run may find out that it must be done again: with the state that the optimizer makes in its first step,
    with the learning rate as a constant, or without replaying calls.
    """
    wish = Wish(reuse=Reuse(reuse, joint=True))
    while True:
        try:
            return _attempted(step, given, model, optimizer, wish)
        except Unbegun as found:
            wish = replace(wish, created=found.created, operations=found.operations)
        except Doubt as doubt:
            without = {**wish.reuse.without, doubt.kind: doubt.why}
            wish = replace(wish, reuse=replace(wish.reuse, without=without))
        except RateRead:
            wish = replace(wish, fixed_rates=True, operations=None, created={})


def _attempted(
    step: Callable[..., Any], given: Given, model: object, optimizer: object, wish: Wish
) -> tuple[Program, Observed]:
    undoing, interrupts = Undoing(), Interrupts()

    def run() -> tuple[Program, Observed, Session]:
        take_turn(undoing)
        interrupts.hold(undoing)
        undoing.later(patches_undone(), modes_restored(), annotations_restored())
        with undecided_bookkeeping(given.dynamic_shapes is not None):
            subject = step_subject(step, model)
            found = optimizing(subject, optimizer)
            return _captured(subject, example_of(subject, given), found, interrupts, wish)

    program, observed, session = undoing.around(run)
    warn_about_kept(session)
    return program, observed


def _captured(
    subject: Subject, example: Example, found: Optimizing, interrupts: Interrupts, wish: Wish
) -> tuple[Program, Observed, StepSession]:
    refuse_uninitialised(subject)
    refuse_sharding(subject, differentiates=True)
    _refuse_hooks(subject)
    _refuse_composed(subject, example)
    _refuse_history(example)
    recorded = record_step(subject, example, found, interrupts, wish)
    session = recorded.session
    with keeping_what_was_recorded(session):
        gradients = attribute_step(recorded, session.step)
        attribute_branches(session.recorder.graph, session.recorder.nested)
        functional = functionalize(session.recorder.graph, session.recorder.sizes)
        exchanged = expand(session.replayer, session.notes, functional, gradients)
        program = with_sizes(
            assemble(subject, example, recorded, functional, exchanged, ()), example, recorded
        ).with_changes(step=recorded.step)
        _refuse_outside(program)
    check(program)
    program = program.with_changes(known=known_of(program.graph, exchanged.copies))
    observed = replace(session.reads.observed(), call=subject.roots[0][1])
    return program, observed, session


def _refuse_hooks(subject: Subject) -> None:
    hooked = [
        f"{row.paths[0]} ({', '.join(names)})"
        for row in state_tensors(subject)
        if (names := gradient_hooks(row.tensor))
    ]
    if hooked:
        raise UnsupportedHook(
            f"there are gradient hooks on parameters: {'; '.join(hooked)}",
            why="what they do in Python would happen once, in the capture, and never again",
            remedy="remove them, and do in the step what they do, between backward() and optimizer.step()",
        )


def _refuse_composed(subject: Subject, example: Example) -> None:
    wholes = [*example.wholes, *(row.tensor for row in state_tensors(subject) if is_composed(row.tensor))]
    if wholes:
        raise UnsupportedStep(
            f"a {type(wholes[0]).__name__} is made of other tensors",
            why="what an optimizer does to such a tensor happens in its parts, which is not recorded yet",
            remedy="capture the model with backward=loss, and let the optimizer run by itself",
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


def _refuse_outside(program: Program) -> None:
    """Tensors that are in no module, or in one only as an attribute, may be read."""
    rows = program.signature.outputs_of(OutputKind.MUTATION)
    written = [row.path for row in rows if program.input(row.of or "").kind is InputKind.CONSTANT]
    if written:
        raise UnsupportedStep(
            f"the step writes {', '.join(written)}, which is neither a parameter nor a buffer of the model",
            why="whoever runs the program on another model would write to the captured tensor",
            remedy="register it as a buffer, or pass a model that holds it: nn.ModuleDict of both models",
        )
