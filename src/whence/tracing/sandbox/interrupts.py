"""Ctrl-C waits for a moment at which it can do no harm.

PyTorch asks fake tensors about themselves from C++ that lets no exception out: an interrupt there would end
the process. So, as asyncio does, a capture in the main thread puts its own handler in the place of Python's.
"""

import signal
import threading
from types import FrameType

from whence.tracing.sandbox.undo import Undoing


class Interrupts:
    """Holds the first Ctrl-C until `let_in` or the end of the capture; a second one comes at once."""

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
