"""Put everything back as it was, whatever ends a capture.

An interrupt can come between any two steps: after a change and before the `try` that would undo it, or in
the middle of undoing. So each way back is noted before the change is made, can be gone twice, and is gone
from one `finally`, which begins anew when it is interrupted itself.
"""

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")
WayBack = Callable[[], object]


class Undoing:
    """The ways back from what has been changed; the last change is undone first."""

    def __init__(self) -> None:
        self._ways: list[WayBack] = []
        self.finished = False

    def later(self, *ways: WayBack) -> None:
        """Go these ways back at the end; each is harmless when its change was not made, or is undone."""
        self._ways.extend(ways)

    def around(self, work: Callable[[], Result]) -> Result:
        """Do `work`; one interrupt, at whatever moment, leaves nothing changed."""
        try:
            result = work()
            self.finished = True
            return result
        finally:
            try:
                _leave_contexts(interrupted=not self.finished)
                self._undo()
            finally:
                self._undo()

    def _undo(self) -> None:
        """Go every way back that has not been gone to its end, also when one of them raises."""
        with ExitStack() as ways:
            for way in self._ways:
                ways.callback(self._go, way)

    def _go(self, way: WayBack) -> None:
        way()
        self._ways.remove(way)


def _leave_contexts(*, interrupted: bool) -> None:
    """Leave now the generator contexts that an interrupt cut off: they would be left when its traceback goes.

    Errors keep their frames; only what is no `Exception` can come at any moment.
    """
    error = sys.exc_info()[1] if interrupted else None
    if error is None or isinstance(error, Exception):
        return
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        _ = (
            frame.f_locals
        )  # under a debugger a frame has a copy of its variables, renewed when it is looked at


class Interrupts:
    """Holds the first Ctrl-C until `let_in` or the end of the capture; a second one comes at once.

    PyTorch asks fake tensors about themselves from C++ that lets no exception out: an interrupt there would
    end the process. So, as asyncio does, a capture in the main thread puts its own handler there.
    """

    def __init__(self) -> None:
        self._came = False

    def hold(self, undoing: Undoing) -> None:
        """From now on; where somebody handles interrupts in a way of his own, that way stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        undoing.later(self.let_in, self._give_back)
        signal.signal(signal.SIGINT, self._arrived)

    def let_in(self) -> None:
        """Now an interrupt may come."""
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            signal.default_int_handler(number, frame)
        self._came = True

    def _give_back(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._arrived:
            signal.signal(signal.SIGINT, signal.default_int_handler)
