"""Capture, step by step."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from whence._torch.sharding import sharding_put_aside
from whence.program import Program
from whence.program.observed import Observed
from whence.program.wellformed import check
from whence.tracing.assemble import assemble
from whence.tracing.attribution import attribute
from whence.tracing.example import example_of
from whence.tracing.functional import functionalize
from whence.tracing.materialising import materialised
from whence.tracing.partial import keeping_what_was_recorded
from whence.tracing.record import mode_of, record, refuse_hooks
from whence.tracing.sharding import refuse_sharding, with_shards
from whence.tracing.sideeffects import warn_about_kept
from whence.tracing.subject import state_tensors, subject_of


def capture(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    backward: bool | Callable[[Any], Tensor],
) -> tuple[Program, Observed]:
    """The program of `model` on these example inputs, with its state as inputs, and what the model read."""
    subject = subject_of(model)
    refuse_sharding(subject, differentiates=bool(backward))
    example = example_of(subject, args, kwargs)
    state = state_tensors(subject)
    if backward:
        refuse_hooks(state)
    modules = [module for _, module in subject.named_modules()]
    with collection_paused(), sharding_put_aside(modules, mode_of(example, state)) as sharded:
        subject = materialised(subject, example)
        recorded = record(subject, example, backward)
        with keeping_what_was_recorded(recorded.session):
            adjoints = attribute(recorded)
            functional = functionalize(recorded.session.recorder.graph)
            program = assemble(subject, example, recorded, functional, adjoints)
        check(program)
        session, loss_function = recorded.session, backward if callable(backward) else None
        observed = session.reads.observed()
        del recorded, adjoints, functional
    program = with_shards(program, subject, sharded)
    warn_about_kept(session)
    return program.with_changes(loss_function=loss_function), observed


@contextmanager
def collection_paused() -> Iterator[None]:
    """Let Python's collector wait: a capture makes many objects that live on, and looking through all of
    them again and again would take a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
