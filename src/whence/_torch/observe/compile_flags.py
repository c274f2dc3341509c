"""Tell code on this thread whether it is being compiled.

transformers and others ask `torch.compiler.is_compiling()` and take branches that read tensor values when the
answer is no. The two flags behind the question are module globals, so they would also answer for models
running in other threads; the object put in their place answers by thread, and by who asks.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import CodeType, ModuleType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._higher_order_ops import utils
from torch._subclasses.fake_tensor import FakeTensor

from whence._torch.files import TORCH
from whence._torch.patching import patched

T = TypeVar("T")

compiler_reading: Callable[[], Any] = eval_frame.get_eval_frame_callback
"""What of `torch.compile` reads any function that runs next, as it does below one that it has given up on;
None where nothing does. A function of Python that asks would be read itself."""
_OURS = (
    "whence looks at a model and runs its program, which torch.compile does not read; leave out "
    "fullgraph=True, or call it outside of what is compiled"
)


def _unread(work: Callable[..., T], *args: Any) -> T:
    return torch.compiler.disable(work, reason=_OURS)(*args)  # type: ignore[no-any-return]


_unread._torchdynamo_disable = True  # type: ignore[attr-defined]
_unread._torchdynamo_disable_msg = _OURS  # type: ignore[attr-defined]
"""What `torch.compiler.disable` puts on a function, and loads the compiler for: who reads it stops and says
why."""


def unread(work: Callable[..., T], /, *args: Any) -> T:
    """What `work` gives, which is our own: `torch.compile` reads none of it, also inside what it reads."""
    if not torch.compiler.is_dynamo_compiling() and compiler_reading() is None:
        return work(*args)
    return _unread(work, *args)


def constant_to_tracers(function: Callable[..., T]) -> Callable[..., T]:
    """`torch.compile` calls this function while it traces, and takes what it returns for a constant.

    `torch.compiler.assume_constant_result` does the same and loads the compiler for it.
    """

    @wraps(function)
    def constant(*args: Any) -> T:
        return function(*args)

    constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return constant


class _AnsweredOnThread:
    """A flag that is asked for its truth on one thread only; others get the answer of before.

    `is_over` says that it has been taken away: another thread's flag may still lead here.
    """

    def __init__(self, answer: Callable[[], bool | None], before: object, unless: Callable[[], bool]) -> None:
        self._thread = threading.get_ident()
        self._answer = answer
        self._unless = unless
        self._before = before
        self._ignored: set[CodeType] = set()
        self.is_over = False

    def end(self) -> None:
        """Answer nobody, and hold nothing of what answered: a class that was asked may still lead here."""
        self.is_over, self._answer, self._unless = True, bool, bool

    def __bool__(self) -> bool:
        return self.answer(sys._getframe(1).f_code)

    @property
    def is_in_force(self) -> bool:
        """Whether it answers whoever asks now."""
        return not self.is_over and threading.get_ident() == self._thread and not self._unless()

    def answer(self, asking: CodeType) -> bool:
        if not self.is_in_force:
            return self._answer_before(asking)
        if asking in self._ignored:
            return True
        answer = self._answer()
        if answer is None:
            self._ignored.add(asking)
            return True
        return answer or self._answer_before(asking)

    def _answer_before(self, asking: CodeType) -> bool:
        before = self._before
        return before.answer(asking) if isinstance(before, _AnsweredOnThread) else bool(before)

    def __or__(self, other: object) -> bool:
        return self.answer(sys._getframe(1).f_code) or bool(other)

    def __and__(self, other: object) -> bool:
        return self.answer(sys._getframe(1).f_code) and bool(other)

    __ror__ = __or__
    __rand__ = __and__

    def __eq__(self, other: object) -> bool:
        return self.answer(sys._getframe(1).f_code) == other

    def __hash__(self) -> int:
        return hash(bool(self))


@contextmanager
def compiling_on_this_thread(
    answer: Callable[[], bool | None], unless: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Let `answer` say what `torch.compiler.is_compiling()` and `is_exporting()` are for the calling thread.

    It is called when code on this thread looks. None is for code that does not count (torch's own, which asks
    ten times for every operation): it is told yes, then and whenever it asks again. A flag that was up before
    stays up. As long as `unless` says so all is as before. Whether a tensor is a fake one is the same
    question where others than torch ask `torch._subclasses.FakeTensor`, as transformers does.
    """
    flags = [
        _AnsweredOnThread(answer, vars(torch.compiler)[name], unless)
        for name in ("_is_compiling_flag", "_is_exporting_flag")
    ]
    fakes = _AnsweredOnThread(answer, False, unless)
    compiling, exporting = flags
    try:
        with (
            patched(torch.compiler, "_is_compiling_flag", compiling),
            patched(torch.compiler, "_is_exporting_flag", exporting),
            patched(torch, "_subclasses", _Subclasses(torch._subclasses, fakes)),
        ):
            yield
    finally:
        for flag in (*flags, fakes):
            flag.end()


class _Subclasses(ModuleType):
    """`torch._subclasses` for code that is not torch's, whose question for `FakeTensor` is answered."""

    def __init__(self, before: ModuleType, flag: _AnsweredOnThread) -> None:
        super().__init__(before.__name__)
        super().__setattr__("before", before)
        super().__setattr__("flag", flag)

    def __getattribute__(self, name: str) -> Any:
        own, found = super().__getattribute__, getattr(super().__getattribute__("before"), name)
        if name == "FakeTensor" and not sys._getframe(1).f_code.co_filename.startswith(TORCH):
            return _Asking("FakeTensor", (), {"flag": own("flag"), "otherwise": found})
        return found

    def __setattr__(self, name: str, value: object) -> None:
        setattr(super().__getattribute__("before"), name, value)


class _Asking(type):
    """A class of which a fake tensor is an instance for those alone who are told so."""

    flag: _AnsweredOnThread
    otherwise: type

    def __instancecheck__(cls, thing: object) -> bool:
        return cls.__subclasscheck__(type(thing))

    def __subclasscheck__(cls, kind: type) -> bool:
        if not issubclass(kind, FakeTensor):
            return False
        return cls.flag.answer(_asking()) if cls.flag.is_in_force else issubclass(kind, cls.otherwise)


def _asking() -> CodeType:
    """The innermost code that is not of this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


class _EagerOnThread:
    """The compiler's stance: on one thread compiled functions run as they were written.

    With `spares_operators`, those that run functions are compiled as they are in eager mode.
    """

    def __init__(self, before: Any, *, spares_operators: bool) -> None:
        self._thread = threading.get_ident()
        self._before = before
        self._spares = spares_operators
        self.is_over = False

    @property
    def stance(self) -> str:
        elsewhere: str = self._before.stance
        here = threading.get_ident() == self._thread and not self.is_over
        return "force_eager" if here and not (self._spares and utils._in_hop_compile()) else elsewhere

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


@contextmanager
def compiled_functions_run_eagerly(*, spares_operators: bool = False) -> Iterator[None]:
    """Let functions and modules compiled by `torch.compile` run their Python on the calling thread.

    `torch.compiler.set_stance("force_eager")` does so for every thread. A compiler that nobody has loaded is
    not loaded for this. In eager mode `torch.cond` and its like compile their branches, for weights that
    these close over get no gradient otherwise: `spares_operators` lets them.
    """
    loaded: Any = sys.modules.get("torch._dynamo.eval_frame")
    if loaded is None:
        with nullcontext() if spares_operators else patched(torch, "compile", _uncompiled(torch.compile)):
            yield
        return
    stance = _EagerOnThread(loaded._stance, spares_operators=spares_operators)
    try:
        with patched(loaded, "_stance", stance):
            yield
    finally:
        stance.is_over = True


def _uncompiled(before: Any) -> Any:
    """A `torch.compile` that gives a function back as it is on this thread."""
    here = threading.get_ident()

    def compiled(model: Any = None, **options: Any) -> Any:
        if threading.get_ident() != here:
            return before(model, **options)
        return _as_it_is if model is None else model

    return compiled


def _as_it_is(model: Any) -> Any:
    return model
