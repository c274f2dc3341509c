"""See operators that other threads run on behalf of one that is being recorded, and sees its own alone."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.overrides import TorchFunctionMode

from whence._torch.patching import patched


class OtherThread(RuntimeError):
    """Ends what another thread was about to compute."""


class _Ending(TorchFunctionMode):
    """Says that this thread uses torch, and ends it, until it is `over`."""

    def __init__(self, used: Callable[[], None], over: threading.Event) -> None:
        self._used = used
        self._over = over

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._over.is_set():
            return func(*args, **(kwargs or {}))
        self._used()
        raise OtherThread("whence records one thread: what others compute would be no part of the program")


@contextmanager
def watched_threads(starting: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """What threads compute that this one starts, or gives work to, inside the block: `starting` is called
    when it does, and what that gives when the other one uses torch, which ends it."""
    here, over = threading.get_ident(), threading.Event()
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def started(thread: threading.Thread) -> None:
        if threading.get_ident() == here:
            vars(thread)["run"] = partial(_silently, thread.run, _Ending(starting(), over))
        start(thread)

    def submitted(pool: ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            task = partial(_run, task, _Ending(starting(), over))
        return submit(pool, task, *args, **kwargs)

    with patched(threading.Thread, "start", started), patched(ThreadPoolExecutor, "submit", submitted):
        try:
            yield
        finally:
            over.set()


def _run(task: Callable[..., Any], ending: _Ending, *args: Any, **kwargs: Any) -> Any:
    with ending:
        return task(*args, **kwargs)


def _silently(task: Callable[..., Any], ending: _Ending) -> None:
    try:
        _run(task, ending)
    except OtherThread:
        return
