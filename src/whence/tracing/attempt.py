"""One attempt at a capture: who takes turns, what is undone."""

import sys
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from whence._torch.autograd.switches import modes_restored
from whence._torch.patching import patches_undone
from whence._torch.record.annotations import annotations_restored
from whence._torch.record.fake_failures import failures_unlogged
from whence._torch.sizes.symbols import undecided_bookkeeping
from whence.dependence.observed import Observed
from whence.program import FlatProgram
from whence.tracing.recording.session import Session
from whence.tracing.recording.side_effects import take_out_kept
from whence.tracing.reuse import AnotherAttempt
from whence.tracing.sandbox.capture_lock import take_turn, while_tracers_wait
from whence.tracing.sandbox.late_modules import imported_again, late_modules_unloaded
from whence.tracing.sandbox.undo import Interrupts, Undoing
from whence.tracing.target.example import Given

S = TypeVar("S", bound=Session)


def attempted(
    given: Given, work: Callable[[Interrupts], tuple[FlatProgram, Observed, S]]
) -> tuple[FlatProgram, Observed]:
    """Do `work`, one at a time, and give PyTorch back as it was; takes tensors from whoever kept them."""
    undoing, interrupts = Undoing(), Interrupts()

    def run() -> tuple[FlatProgram, Observed, S]:
        take_turn(undoing)
        interrupts.hold(undoing)
        undoing.later(patches_undone(), modes_restored(), annotations_restored())
        # a capture has frames of its own around every module call: what eager can nest it can nest, too
        limit = sys.getrecursionlimit()
        undoing.later(partial(sys.setrecursionlimit, limit))
        sys.setrecursionlimit(2 * limit + 1000)
        with (
            while_tracers_wait(),
            undecided_bookkeeping(given.dynamic_shapes is not None),
            failures_unlogged(),
        ):
            return work(interrupts)

    with late_modules_unloaded() as late:
        program, observed, session = copy_context().run(undoing.around, run)  # its context variables end
    if not late:
        take_out_kept(session)
    session.end()
    if late:
        raise AnotherAttempt(partial(imported_again, late), "a module is loaded")
    return program, observed
