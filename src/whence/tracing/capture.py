"""Capture, step by step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from whence._torch.annotations import annotations_restored
from whence._torch.composed import is_composed
from whence._torch.modes import modes_restored
from whence._torch.patching import patches_undone
from whence._torch.sharding import sharding_put_aside
from whence._torch.sizes import undecided_bookkeeping
from whence.program import Program
from whence.program.known import known_of
from whence.program.observed import Observed
from whence.program.wellformed import check
from whence.tracing.assemble import assemble
from whence.tracing.attribution import attribute
from whence.tracing.branch_origins import attribute_branches
from whence.tracing.composed import COMPOSED
from whence.tracing.example import Given, example_of
from whence.tracing.functional import functionalize
from whence.tracing.interrupts import Interrupts
from whence.tracing.materialising import materialised
from whence.tracing.partial import keeping_what_was_recorded
from whence.tracing.record import mode_of, record, refuse_hooks
from whence.tracing.replay.expand import expand
from whence.tracing.replay.reuse import Reuse
from whence.tracing.replay.template import Doubt
from whence.tracing.session import Session
from whence.tracing.settling import with_sizes
from whence.tracing.sharding import refuse_sharding, with_shards
from whence.tracing.sideeffects import warn_about_kept
from whence.tracing.subject import state_tensors, subject_of
from whence.tracing.turns import take_turn
from whence.tracing.undoing import Undoing


def capture(
    model: Callable[..., Any],
    given: Given,
    backward: bool | Callable[[Any], Tensor],
    *,
    reuse: bool = True,
) -> tuple[Program, Observed]:
    """The program of `model` on these example inputs, with its state as inputs, and what the model read.

    With `reuse`, a call that is like one that was recorded is not run again.
    """
    wanted = Reuse(reuse, joint=bool(backward))
    while True:
        try:
            return _attempted(model, given, backward, wanted)
        except Doubt as doubt:
            wanted = replace(wanted, without={**wanted.without, doubt.kind: doubt.why})


def _attempted(
    model: Callable[..., Any],
    given: Given,
    backward: bool | Callable[[Any], Tensor],
    reuse: Reuse,
) -> tuple[Program, Observed]:
    undoing, interrupts = Undoing(), Interrupts()

    def run() -> tuple[Program, Observed, Session]:
        take_turn(undoing)
        interrupts.hold(undoing)
        undoing.later(patches_undone(), modes_restored(), annotations_restored())
        with undecided_bookkeeping(given.dynamic_shapes is not None):
            return _captured(model, given, backward, interrupts, reuse)

    program, observed, session = undoing.around(run)
    warn_about_kept(session)
    return program.with_changes(loss_function=backward if callable(backward) else None), observed


def _captured(
    model: Callable[..., Any],
    given: Given,
    backward: bool | Callable[[Any], Tensor],
    interrupts: Interrupts,
    reuse: Reuse,
) -> tuple[Program, Observed, Session]:
    subject = subject_of(model)
    refuse_sharding(subject, differentiates=bool(backward))
    example = example_of(subject, given)
    state = state_tensors(subject)
    if backward:
        refuse_hooks(state)
    modules = [module for _, module in subject.named_modules()]
    with sharding_put_aside(modules, mode_of(example, state)) as sharded:
        subject = materialised(subject, example, interrupts)
        if example.wholes or any(is_composed(row.tensor) for row in state):
            reuse = replace(reuse, without={**reuse.without, None: COMPOSED})
        recorded = record(subject, example, backward, interrupts, reuse)
        with keeping_what_was_recorded(recorded.session):
            gradients = attribute(recorded)
            attribute_branches(recorded.session.recorder.graph, recorded.session.recorder.nested)
            functional = functionalize(recorded.session.recorder.graph, recorded.session.recorder.sizes)
            exchanged = expand(recorded.session.replayer, recorded.session.notes, functional, gradients)
            program = with_sizes(
                assemble(subject, example, recorded, functional, exchanged, given.preserve),
                example,
                recorded,
            )
        check(program)
        program = program.with_changes(known=known_of(program.graph, exchanged.copies))
        observed = recorded.session.reads.observed()
    return with_shards(program, subject, sharded), observed, recorded.session
