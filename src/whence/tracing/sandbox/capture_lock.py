"""Captures take turns, with PyTorch's tracers, too, and Python's collector waits for them."""

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from whence._torch.observe.threads import tracers_take_turns
from whence.errors import NestedCapture
from whence.tracing.sandbox.undo import Result, Undoing

# One capture at a time: while a model runs on fake tensors its attributes may hold some, so another capture
# may not even look at it.
_turn = threading.RLock()
_LONGEST_WAIT = 60.0


def take_turn(undoing: Undoing) -> None:
    """One capture at a time, and none inside another."""
    if _is_mine():
        raise NestedCapture(
            "a capture was started inside a capture",
            why="the model (or its loss) calls whence.capture while it is being captured",
            remedy="capture the outer model only, and select the part you need",
        )
    undoing.later(_end_turn)
    _turn.acquire()


def while_tracers_wait() -> AbstractContextManager[None]:
    """PyTorch's tracers and compiler in other threads take turns with the capture whose turn it is.

    A model may wait for a thread that traces, or a trace for this one: then they go on after a while.
    """
    return tracers_take_turns(_let_end, (_let_end.__code__, take_turn.__code__), _LONGEST_WAIT)


def _let_end() -> None:
    """Wait until no capture goes on, and take no turn."""
    if _turn.acquire(timeout=_LONGEST_WAIT):
        _turn.release()


def _end_turn() -> None:
    """The lock itself knows whether it was taken: an interrupt may have come just before or just after."""
    if _is_mine():
        _turn.release()


def _is_mine() -> bool:
    return _turn._is_owned()  # type: ignore[attr-defined, no-any-return]


_MANY = 100_000


class _Old:
    """How much Python's collector was told is old, since it looked through that.

    It reckons with what it finds old itself alone: programs that nobody holds any more would stay.
    """

    def __init__(self) -> None:
        self._collections, self._count, self._blocks = -1, 0, 0

    def look(self) -> None:
        """Let it look through all where there is half as much again as when it did so."""
        done = gc.get_stats()[-1]["collections"]
        if done != self._collections:
            self._collections, self._count, self._blocks = done, 0, sys.getallocatedblocks()
        if self._count > _MANY and self._has_grown():
            gc.collect()

    def _has_grown(self) -> bool:
        """Objects would have to be counted; how many blocks of memory there are, Python knows, unless they
        are `malloc`'s (`PYTHONMALLOC=malloc`)."""
        blocks = sys.getallocatedblocks()
        return not blocks or blocks > 1.5 * self._blocks

    def grow(self) -> None:
        """Let all that is alive count as old: most of it is the program, which nobody throws away soon.

        Python collects by age; to freeze and thaw objects is how it is told that they are old.
        """
        self._count += gc.get_count()[0]
        gc.freeze()
        gc.unfreeze()


_old = _Old()


def without_collection(work: Callable[[], Result]) -> Result:
    """Let Python's collector wait: a capture makes many objects that live on, and looking through all of
    them again and again would take a third of its time."""
    undoing, frozen = Undoing(), gc.get_freeze_count() > 0

    def run() -> Result:
        if gc.isenabled():
            _old.look()
            undoing.later(gc.enable, *([] if frozen else [_old.grow]))
            gc.disable()
        return work()

    return undoing.around(run)
