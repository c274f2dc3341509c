"""What other threads do to one that is being recorded: operators that they run for it, which sees its own
alone, and what PyTorch does to the whole process while it traces or compiles in them."""

import inspect
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from whence._torch.function_tracer import code_running
from whence._torch.patching import patched
from whence._torch.pytrees import tree_flatten
from whence._torch.tensors import active_modes

_COMPILER = "torch._dynamo.convert_frame"
_TRACERS = (
    ("torch.fx._symbolic_trace", "Tracer", "trace"),
    ("torch.fx.experimental.proxy_tensor", "_MakefxTracer", "_trace_inner"),
    ("torch.export._trace", "", "_export"),
    (_COMPILER, "CatchErrorsWrapper", "__call__"),
)
"""What traces and compiles for PyTorch: a file, a class in it, and a function."""
_PAUSE = 0.001


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


@contextmanager
def tracers_take_turns(
    let_end: Callable[[], object], waiting: Collection[CodeType], longest: float
) -> Iterator[None]:
    """In other threads PyTorch's tracers and its compiler run before the block, or behind it.

    They patch classes, turn switches and say that all is being compiled, for the whole process. Those that
    have begun are waited for, for `longest` seconds at most; others call `let_end` before they begin, unless
    this thread has started theirs. A thread in code that is `waiting` is not at work.
    """
    at_work = set[CodeType]()
    with ExitStack() as patches:
        for owner, name in _loaded_tracers():
            function = vars(owner)[name]
            in_turn = _in_turn(function, let_end, at_work)
            at_work |= {inspect.unwrap(function).__code__, in_turn.__code__}
            patches.enter_context(patched(owner, name, in_turn))
        end = time.monotonic() + longest
        while _are_others_in(at_work - _compiling_here(), waiting) and time.monotonic() < end:
            time.sleep(_PAUSE)
        yield


def _loaded_tracers() -> Iterator[tuple[Any, str]]:
    """Where each is found; none is loaded for this."""
    for file, kind, name in _TRACERS:
        if (module := sys.modules.get(file)) is not None:
            yield getattr(module, kind) if kind else module, name


def _in_turn(
    function: Callable[..., Any], let_end: Callable[[], object], at_work: Collection[CodeType]
) -> Any:
    @wraps(function)
    def begins(*args: Any, **kwargs: Any) -> Any:
        is_inner = _Ending.__name__ in active_modes() or _is_in(sys._getframe(1), at_work)
        if not is_inner:
            let_end()
        return function(*args, **kwargs)

    return begins


def _compiling_here() -> set[CodeType]:
    """The code of the compiler where this thread runs inside of it: others in it wait for this one."""
    loaded: Any = sys.modules.get(_COMPILER)
    if loaded is None or not _is_held_here(loaded.compile_lock):
        return set()
    return {inspect.unwrap(loaded.CatchErrorsWrapper.__call__).__code__}


def _is_held_here(lock: Any) -> bool:
    return bool(lock._is_owned())  # of Python's, and no attribute of PyTorch's


def _are_others_in(at_work: Collection[CodeType], waiting: Collection[CodeType]) -> bool:
    here = threading.get_ident()
    frames = (frame for thread, frame in sys._current_frames().items() if thread != here)
    return any(_is_in(frame, at_work) and not _is_in(frame, waiting) for frame in frames)


def _is_in(frame: FrameType, codes: Collection[CodeType]) -> bool:
    """Whether a frame, or one that has called it, runs one of these codes."""
    return any(code in codes for code in code_running(frame))
