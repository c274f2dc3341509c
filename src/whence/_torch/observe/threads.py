"""See operators that other threads run on behalf of one that is being recorded, and sees its own alone."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from whence._torch.patching import patched
from whence._torch.pytrees import tree_flatten


class OtherThread(RuntimeError):
    """Ends what another thread was about to compute."""


Told = Callable[[Tensor | None], None]
"""Is told each tensor that another thread computes, and None when that takes a tensor of the recording."""


class _Ending(TorchFunctionMode):
    """Tells what this thread computes, and ends it at a tensor of the recording, until it is `over`."""

    def __init__(self, told: Told, over: threading.Event) -> None:
        self._told = told
        self._over = over

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._over.is_set():
            return func(*args, **(kwargs or {}))
        if any(isinstance(leaf, FakeTensor) for leaf in tree_flatten((args, kwargs))[0]):
            self._told(None)
            raise OtherThread("whence records one thread: what others compute is no part of the program")
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Tensor):
                self._told(leaf)
        return result


@contextmanager
def watched_threads(starting: Callable[[], Told]) -> Iterator[None]:
    """What threads compute that this one starts, or gives work to, inside the block: `starting` is called
    when it does, and gives what is told of the other one."""
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
