"""Capture, step by step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from whence._torch.subclasses.fully_sharded import sharding_put_aside
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.dependence.observed import Observed
from whence.program import FlatProgram
from whence.program.wellformed import check
from whence.tracing.answers import Answers
from whence.tracing.assembling.assemble import finished
from whence.tracing.assembling.attribution import attribute
from whence.tracing.attempt import attempted
from whence.tracing.attribution.wrapper_subclasses import COMPOSED
from whence.tracing.decisions import DECIDES
from whence.tracing.lazy_modules import materialised
from whence.tracing.recording.partial import keeping_what_was_recorded
from whence.tracing.recording.run import mode_of, record
from whence.tracing.recording.session import Session
from whence.tracing.reuse import Reuse, until_it_holds
from whence.tracing.sandbox.undo import Interrupts
from whence.tracing.target.eligibility import refuse_gradient_hooks, refuse_inference_mode
from whence.tracing.target.elsewhere import captured_for_device, moved
from whence.tracing.target.example import Given, example_of
from whence.tracing.target.fully_sharded import refuse_sharding, with_shards
from whence.tracing.target.subject import subject_of
from whence.tracing.variants import captured_for_sizes


def capture(
    model: Callable[..., Any], given: Given, backward: bool | Callable[[Any], Tensor], *, reuse: bool = True
) -> tuple[FlatProgram, Observed]:
    """The program of `model` on these example inputs, with its state as inputs, and what the model read.

    With `reuse`, a call that is like one that was recorded is not run again.
    """

    def once(answers: Answers, given: Given) -> tuple[FlatProgram, Observed]:
        wanted = Reuse(reuse, joint=bool(backward), composites=not backward, answers=answers)
        wish = wanted.but_where(given.decide, DECIDES)
        there = moved(model, given, backward)
        return until_it_holds(wish, partial(_attempted, there.model, there.given, there.backward))

    program, observed = captured_for_device(given, lambda given: captured_for_sizes(given, once))
    return program.under(loss_function=backward if callable(backward) else None), observed


def _attempted(
    model: Callable[..., Any], given: Given, backward: bool | Callable[[Any], Tensor], reuse: Reuse
) -> tuple[FlatProgram, Observed]:
    program, observed = attempted(given, lambda held: _captured(model, given, backward, held, reuse))
    return program.under(loss_function=backward if callable(backward) else None), observed


def _captured(
    model: Callable[..., Any],
    given: Given,
    backward: bool | Callable[[Any], Tensor],
    interrupts: Interrupts,
    reuse: Reuse,
) -> tuple[FlatProgram, Observed, Session]:
    subject = subject_of(model)
    refuse_sharding(subject, differentiates=bool(backward))
    example = example_of(subject, given)
    if backward:
        refuse_inference_mode(subject.name)
        refuse_gradient_hooks(subject)
    modules = [module for _, module in subject.named_modules()]
    with sharding_put_aside(modules, mode_of(example, subject.state)) as sharded:
        subject = replace(subject) if sharded else subject  # whose parameters are others now
        subject = materialised(subject, example, interrupts)
        if example.wholes or any(is_composed(row.tensor) for row in subject.state):
            reuse = reuse.but_for(None, COMPOSED)
        recorded = record(subject, example, backward, interrupts, reuse)
        with recorded.session.ended_by_errors(), keeping_what_was_recorded(recorded.session):
            gradients = attribute(recorded)
            program = finished(example, recorded, gradients)
        check(program)
        observed = recorded.session.run.reads.observed()
    return with_shards(program, subject, sharded), observed, recorded.session
