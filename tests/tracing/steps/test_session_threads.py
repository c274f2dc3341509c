"""What a capture of a step watches is this thread's alone."""

import threading
from queue import SimpleQueue

import torch
from torch import Tensor

import whence
from tests.checks import differing, state
from tests.tracing.steps.small import batch, small, zero_first


def test_other_threads_train_meanwhile() -> None:
    """Another thread takes whole steps of its own while this one is being captured, and gets eager's bits."""
    (model, optimizer), (theirs, other), (eager, expected) = small(), small(), small()
    inner, elsewhere = zero_first(model, optimizer), zero_first(theirs, other)
    seen: SimpleQueue[Tensor] = SimpleQueue()

    def train() -> None:
        seen.put(elsewhere(batch()))

    class Meanwhile:
        """A step that waits for another thread, twice."""

        def __call__(self, x: Tensor) -> Tensor:
            self.wait()
            loss: Tensor = inner(x)
            self.wait()
            return loss

        def wait(self) -> None:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

    program = whence.capture_step(Meanwhile(), (batch(),), model=model, optimizer=optimizer)
    assert seen.qsize() == 4
    for _ in range(4):
        assert torch.equal(seen.get(), zero_first(eager, expected)(batch()))
    assert differing(state(eager), state(theirs)) == []
    assert program.bind(model, optimizer)(batch()) is not None
