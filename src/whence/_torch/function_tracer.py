"""See every Python function that begins to run on this thread, but for our own.

While functions are traced, all of Python is several times as slow: where our own code works nobody is told.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FrameType
from typing import Any, Literal

from whence._torch.patching import patched

_Kind = Literal["trace", "profile"]
_put_tracer, _tracer = sys.settrace, sys.gettrace


class FunctionTracer:
    """Tells those who want to know of every Python function that begins to run."""

    def __init__(self) -> None:
        self.begins: Callable[[FrameType, str, object], None] = self._begins
        self._listening: list[Callable[[FrameType], bool]] = []
        self._seen: dict[int, CodeType] = {}
        self._is_aside = False

    @contextmanager
    def seen_by(self, met: Callable[[FrameType], bool]) -> Iterator[None]:
        """Tell `met` of a call of every function that is called inside the block, until that is enough."""
        self._seen.clear()
        self._listening.append(met)
        try:
            if len(self._listening) > 1:
                yield
            else:
                with _tracing(self.begins):
                    yield
        finally:
            self._listening.remove(met)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside the block, which is our own, nobody is told of functions but of those that are `told`."""
        if _tracer() != self.begins:  # nobody listens, or somebody else traces, too
            yield
            return
        _put_tracer(None)
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False
            _put_tracer(self.begins)

    def put_aside(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `work` gives, which is our own: nobody is told of the functions that it calls."""
        _put_tracer(None)
        self._is_aside = True
        try:
            return work(*args, **kwargs)
        finally:
            self._is_aside = False
            if self._listening:
                _put_tracer(self.begins)

    def told(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `work` gives, which may call functions of the user's, from inside our own."""
        if not self._is_aside:
            return work(*args, **kwargs)
        self._is_aside = False
        _put_tracer(self.begins)
        try:
            return work(*args, **kwargs)
        finally:
            _put_tracer(None)
            self._is_aside = True

    def _begins(self, frame: FrameType, _event: str, _argument: object) -> None:
        code = frame.f_code
        if id(code) not in self._seen:
            settled = [met(frame) for met in self._listening]
            if all(settled):
                self._seen[id(code)] = code


def untold(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `work` gives, which is our own; a tracer of ours that is on is told of nothing."""
    tracer = _tracer()
    if tracer is None:
        return work(*args, **kwargs)
    told = getattr(tracer, "__self__", None)
    return told.put_aside(work, *args, **kwargs) if type(told) is FunctionTracer else work(*args, **kwargs)


class Untold:
    """A context of our own, to enter and to leave which is nothing that a tracer is told of."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context = context

    def __enter__(self) -> Any:
        return untold(self._context.__enter__)

    def __exit__(self, *error: Any) -> Any:
        return untold(self._context.__exit__, *error)


def code_running(innermost: FrameType | None = None) -> Iterator[CodeType]:
    """What runs on this thread, the innermost first; or on another, of which that is `innermost`."""
    frame: FrameType | None = innermost or sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


class _Beside:
    """What the interpreter calls for ours, and for what code of this thread puts there meanwhile, which is
    told that it is alone. Other threads have their own."""

    def __init__(self, kind: _Kind, ours: Callable[..., Any]) -> None:
        self._put, self._now = getattr(sys, f"set{kind}"), getattr(sys, f"get{kind}")
        self._thread = threading.get_ident()
        self._ours, self._theirs = ours, None

    def put(self, theirs: Any) -> None:
        """In the place of `sys.settrace`, or of `sys.setprofile`."""
        if threading.get_ident() != self._thread:
            self._put(theirs)
            return
        self._theirs = theirs
        self._put(self._ours if theirs is None else self._both)

    def now(self) -> Any:
        """In the place of `sys.gettrace`, or of `sys.getprofile`."""
        return self._theirs if threading.get_ident() == self._thread else self._now()

    def _both(self, frame: FrameType, event: str, argument: object) -> Any:
        self._ours(frame, event, argument)
        return None if self._theirs is None else self._theirs(frame, event, argument)


@contextmanager
def beside(kind: _Kind, ours: Callable[..., Any]) -> Iterator[None]:
    """Let the interpreter call `ours` inside the block, whatever tracer, or profiler, its code has itself."""
    shared, put = _Beside(kind, ours), getattr(sys, f"set{kind}")
    with patched(sys, f"set{kind}", shared.put), patched(sys, f"get{kind}", shared.now):
        put(ours)
        try:
            yield
        finally:
            put(None)


@contextmanager
def _tracing(begins: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    """Let the interpreter call `begins` for every frame.

    A tracer that returns nothing is told of nothing else; where somebody traces already (a debugger, a
    measurement of coverage), a profiler is, too.
    """
    with beside("trace", begins) if _tracer() is None else _profiling(begins):
        yield


@contextmanager
def _profiling(begins: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    before: Any = sys.getprofile()

    def notice(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            begins(frame, event, argument)

    try:
        with beside("profile", notice):
            yield
    finally:
        if hasattr(before, "enable"):  # the C profiler turns itself on
            before.enable()
        else:
            sys.setprofile(before)
