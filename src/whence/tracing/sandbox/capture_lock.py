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


_MANY = 100_000


class _Old:
    """How many objects Python's collector was told are old, since it looked through those.

    It reckons with those only that it finds old itself: programs that nobody holds any more would stay.
    """

    def __init__(self) -> None:
        self._count, self._collections, self._enough = 0, 0, _MANY

    def look(self) -> None:
        """Let it look through all where half of them came since it did so.

        To count them takes long where there are many, so it is done when so many may have come.
        """
        done = gc.get_stats()[-1]["collections"]
        if done != self._collections:
            self._count, self._collections, self._enough = 0, done, _MANY
        if self._count <= self._enough:
            return
        self._enough = _objects_there() // 2
        if self._count > self._enough:
            gc.collect()

    def grow(self) -> None:
        """Let all that is alive count as old: most of it is the program, which nobody throws away soon.

        Python collects by age; to freeze and thaw objects is how it is told that they are old.
        """
        self._count += gc.get_count()[0]
        gc.freeze()
        gc.unfreeze()


def _objects_there() -> int:
    """How many objects there are.

    `gc.get_objects` would hold each for a moment, and a tuple that another thread is building must not be
    held: Python raises a SystemError there. Objects that somebody has frozen count for none.
    """
    if gc.get_freeze_count():
        return 2 * _MANY
    gc.freeze()
    try:
        return gc.get_freeze_count()
    finally:
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
