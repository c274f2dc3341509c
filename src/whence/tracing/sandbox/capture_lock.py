"""Captures take turns, and Python's collector waits for them."""

import gc
import threading
from collections.abc import Callable

from whence.errors import NestedCapture
from whence.tracing.sandbox.undo import Result, Undoing

# One capture at a time: while a model runs on fake tensors its attributes may hold some, so another capture
# may not even look at it.
_turn = threading.RLock()


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


def _end_turn() -> None:
    """The lock itself knows whether it was taken: an interrupt may have come just before or just after."""
    if _is_mine():
        _turn.release()


def _is_mine() -> bool:
    return _turn._is_owned()  # type: ignore[attr-defined, no-any-return]


def without_collection(work: Callable[[], Result]) -> Result:
    """Let Python's collector wait: a capture makes many objects that live on, and looking through all of
    them again and again would take a third of its time."""
    undoing, frozen = Undoing(), gc.get_freeze_count() > 0

    def run() -> Result:
        if gc.isenabled():
            undoing.later(gc.enable, *([] if frozen else [_grown_old]))
            gc.disable()
        return work()

    return undoing.around(run)


def _grown_old() -> None:
    """Let everything that is alive count as old: most of it is the program, which nobody throws away soon.

    Python collects by age; to freeze and thaw objects is how it is told that they are old.
    """
    gc.freeze()
    gc.unfreeze()
