"""Everything whence raises on purpose.

    WhenceError
    ├── CaptureError                  1xx  the model could not be recorded
    │   ├── NotCallable             WH101  no module or callable, or of a kind that cannot be recorded
    │   ├── UnsupportedInput        WH102  an input or a result is of a type that no one registered
    │   ├── InputMismatch           WH103  the inputs do not fit the model's signature
    │   ├── DataDependent           WH104  a Python decision needs a tensor's value
    │   ├── UnsupportedMutation     WH105  a write that has no functional form
    │   ├── UnsupportedHook         WH106  a gradient hook that a program cannot hold
    │   ├── InvalidLoss             WH107  the loss is no number, or nothing in it needs a gradient
    │   ├── NestedCapture           WH108  a capture was started inside a capture
    │   ├── SideEffect              WH109  the model does on the side what a graph cannot repeat
    │   ├── UnsupportedGenerator    WH110  random numbers from a generator of the model's own
    │   ├── UnmatchedRecomputation  WH111  a checkpoint draws other random numbers the second time
    │   ├── LostState               WH112  the model keeps something that a program would not keep
    │   ├── UnsupportedModule       WH113  a module is sharded, or averages gradients between processes
    │   ├── InvalidShapes           WH114  dynamic_shapes does not fit the inputs
    │   ├── SpecialisedShapes       WH115  the model fixes a size that was asked to vary
    │   ├── UnsupportedOperator     WH116  a branch, a loop or an operator that cannot be recorded
    │   └── UnsupportedStep         WH117  a training step that one program cannot repeat
    ├── (use of a program)            2xx
    │   ├── SelectionError          WH201  a pattern or a name that finds nothing
    │   ├── CallError               WH202  called in another way than it was captured
    │   ├── NotDifferentiable       WH203  a backward pass that would give a wrong gradient
    │   └── FailedOperation         WH204  an operation of a program from a file raised an error
    ├── (validity)                    3xx
    │   ├── StaleCapture            WH301  something that the capture relied on has changed
    │   ├── MalformedProgram        WH302  a program breaks one of its own rules
    │   └── LostProvenance          WH303  a pass lost where operations come from, or changed the signature
    ├── (usage)                       4xx
    │   ├── UsageError              WH401  an option, or the command line, that whence cannot use
    │   └── UnsupportedRelease      WH402  a release of PyTorch without something that whence relies on
    └── (other people's graphs, files) 5xx
        ├── UnsupportedGraph        WH501  a graph from elsewhere holds what a program cannot
        ├── NotExportable           WH502  a program holds what an ExportedProgram cannot
        ├── NotStorable             WH503  a program holds what a file cannot
        └── UnreadableFile          WH504  a file that holds no program, or one that needs what is not there

A code is for good: it is never given to another error, and `docs/errors/` has a page for each. `WhenceError`
and `CaptureError` are there to be caught and are never raised themselves.

Each error says what happened, where, why, and what to do: `what`, `where`, `why`, `remedy`. What can be found
at once is reported at once, one by one in `faults`. An error raised while a model is recorded carries what
had been recorded until then, in `partial`. A model that fails by itself raises its own error, with a note
saying that a capture was running and where.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self


@dataclass(frozen=True)
class Place:
    """Where something happened: a module path, and a line of the user's code."""

    module: str | None = None
    line: str | None = None

    def __str__(self) -> str:
        spelled = self.module or "(root)"
        parts = [f"in module {spelled}"] if self.module is not None else []
        parts += [f"at {self.line}"] if self.line else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Fault:
    """One of several things that are wrong at once."""

    what: str
    where: Place = Place()
    why: str = ""
    remedy: str = ""


class PartialProgram(Protocol):
    """What had been recorded when a capture stopped; printed, it ends where the capture did."""

    @property
    def graph(self) -> Any:
        """The `torch.fx` graph of the operations until then."""


class WhenceError(Exception):
    """Base of all errors raised by whence.

    `faults` are the single things that are wrong, where several were found; the other fields name them all.
    `shown` is the program around what is wrong, with the message at each node, for errors about a graph.
    """

    code: ClassVar[str]
    faults: tuple[Fault, ...] = ()
    shown: str = ""

    def __init__(self, what: str, *, where: Place | None = None, why: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where or Place()
        self.why = why
        self.remedy = remedy

    @classmethod
    def of(cls, faults: Iterable[Fault]) -> Self:
        """One error for all of them; a place, reason or remedy that they share is said once."""
        rows = tuple(faults)
        places = {row.where for row in rows}
        error = cls(
            _texts_together(_faults_in_words(rows)),
            where=places.pop() if len(places) == 1 else None,
            why=_texts_together(row.why for row in rows),
            remedy=_texts_together(row.remedy for row in rows),
        )
        error.faults = rows if len(rows) > 1 else ()
        return error

    @classmethod
    def refuse(cls, faults: Iterable[Fault]) -> None:
        """Raise one error for all of them, where there are any."""
        if rows := tuple(faults):
            raise cls.of(rows)

    def __str__(self) -> str:
        rows = self.faults or (Fault(self.what, self.where, self.why, self.remedy),)
        blocks = [line for alike in _alike_faults(rows) for line in _block(self.code, alike)]
        shown = [self.shown] if self.shown else []
        return "\n".join([*blocks, *self._hints(), *shown])

    def _hints(self) -> list[str]:
        """Where there is more to see."""
        return [f"  more: docs/errors/{self.code}.md in whence's repository"]


def _alike_faults(faults: Sequence[Fault]) -> Iterable[Sequence[Fault]]:
    """Faults for the same reason and with the same remedy are one paragraph."""
    found: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        found.setdefault((fault.why, fault.remedy), []).append(fault)
    return found.values()


def _block(code: str, alike: Sequence[Fault]) -> list[str]:
    first = alike[0]
    where = str(first.where) if len({fault.where for fault in alike}) == 1 else ""
    rows = [f"[{code}] {_texts_together(_faults_in_words(alike))}"]
    rows += [f"  where: {where}"] if where else []
    rows += [f"  why: {first.why}"] if first.why else []
    rows += [f"  what to do: {first.remedy}"] if first.remedy else []
    return rows


def _faults_in_words(faults: Sequence[Fault]) -> list[str]:
    """What is wrong, each with its place where there are several places."""
    if len({fault.where for fault in faults}) == 1:
        return [fault.what for fault in faults]
    return [f"{fault.what} ({fault.where})" if str(fault.where) else fault.what for fault in faults]


def _texts_together(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text))


class CaptureError(WhenceError):
    """The model could not be recorded; it is left as it was.

    `partial` is what had been recorded when it stopped; None for what is found before the model runs.
    `of_first_step` says that a training step did it which was the first, and that later ones may not.
    """

    partial: PartialProgram | None = None
    of_first_step: bool = False

    def in_first_step(self, *, holds: bool = True) -> Self:
        """The same error, which the second step may not raise."""
        self.of_first_step = self.of_first_step or holds
        return self

    def _hints(self) -> list[str]:
        until = [] if self.partial is None else ["  recorded until then: print(error.partial)"]
        return [*until, *super()._hints()]

    def __reduce__(self) -> tuple[Any, ...]:
        """An error travels to another process without the graph, which holds tensors of this one."""
        return type(self), (self.what,), {**vars(self), "partial": None}


class NotCallable(CaptureError):
    """What was given is neither a module nor a callable, or is of a kind that cannot be recorded."""

    code = "WH101"


class UnsupportedInput(CaptureError):
    """An input or a result is neither a tensor, nor a constant, nor a container that pytree knows."""

    code = "WH102"


class InputMismatch(CaptureError):
    """The example inputs do not fit the signature of the model."""

    code = "WH103"


class DataDependent(CaptureError):
    """Python asked for the value of a tensor, which a recording does not have."""

    code = "WH104"


class UnsupportedMutation(CaptureError):
    """An in-place operation has no functional form that keeps the model's numbers."""

    code = "WH105"


class UnsupportedHook(CaptureError):
    """A gradient hook sits on a parameter, where the captured backward and autograd would both run it."""

    code = "WH106"


class InvalidLoss(CaptureError):
    """The loss is not one number, or nothing in it needs a gradient."""

    code = "WH107"


class NestedCapture(CaptureError):
    """A capture was started while this thread was already capturing."""

    code = "WH108"


class SideEffect(CaptureError):
    """The model writes gradients, or touches random generators, in a way that a graph cannot repeat."""

    code = "WH109"


class UnsupportedGenerator(CaptureError):
    """An operation draws random numbers from a generator of its own, which is no part of a graph."""

    code = "WH110"


class UnmatchedRecomputation(CaptureError):
    """A checkpoint that runs its region again does not draw the random numbers it drew the first time."""

    code = "WH111"


class LostState(CaptureError):
    """The model leaves a tensor or another change behind, which a program would not do when it runs."""

    code = "WH112"


class UnsupportedModule(CaptureError):
    """A module is managed by something that one program cannot stand for: sharding, averaging."""

    code = "WH113"


class InvalidShapes(CaptureError):
    """`dynamic_shapes` is not arranged as the inputs are, or asks for what the example does not keep."""

    code = "WH114"


class SpecialisedShapes(CaptureError):
    """The model does not allow all sizes that were asked for.

    `dimensions` are those it concerns, each with what was asked, what the model allows, and where it decided
    so. `suggested` is a `dynamic_shapes` with which the capture works.
    """

    code = "WH115"
    dimensions: tuple[Any, ...] = ()
    suggested: Any = None

    def __str__(self) -> str:
        rows = [f"  {fault.what}" for fault in self.faults]
        todo = f"  what to do:{self.remedy}"
        return "\n".join([f"[{self.code}] {self.what}", *rows, todo, *self._hints()])


class UnsupportedOperator(CaptureError):
    """An operator cannot be recorded as the model calls it: a branch, a loop, one that fake tensors lack."""

    code = "WH116"


class UnsupportedStep(CaptureError):
    """A training step does something that one program cannot repeat, or its first step is another one."""

    code = "WH117"


class SelectionError(WhenceError, LookupError):
    """A pattern, path or name finds nothing, or more than one thing where one was asked for."""

    code = "WH201"


class CallError(WhenceError, TypeError, ValueError, RuntimeError):
    """A program, flat module or tree was called in another way than it was captured.

    It is of all three kinds because PyTorch raises one or the other, and code that catches them stays right.
    `misfits` are the arguments that do not fit, a row for each: what was expected, what was found, and where.
    """

    code = "WH202"
    misfits: tuple[Any, ...] = ()


class NotDifferentiable(WhenceError, RuntimeError):
    """A backward pass was asked for where the recorded program cannot give the right one."""

    code = "WH203"


class FailedOperation(WhenceError, RuntimeError, TypeError, ValueError, IndexError):
    """An operation of a program that was read from a file raised an error of PyTorch's or Python's own.

    It is of all these kinds because PyTorch raises one or the other, and code that catches them stays right.
    """

    code = "WH204"


class StaleCapture(WhenceError):
    """A guard does not hold: something that the capture relied on has changed.

    `violations` are the guards that do not hold, each with what was expected and what was found.
    """

    code = "WH301"

    def __init__(
        self,
        what: str,
        *,
        where: Place | None = None,
        why: str = "",
        remedy: str = "",
        violations: tuple[object, ...] = (),
    ) -> None:
        super().__init__(what, where=where, why=why, remedy=remedy)
        self.violations = violations


class MalformedProgram(WhenceError):
    """A program breaks one of its own rules."""

    code = "WH302"


class LostProvenance(WhenceError):
    """After a pass it is not known where operations come from, or the graph does not fit the signature."""

    code = "WH303"


class UsageError(WhenceError):
    """An option or a name, from Python or from the command line, that whence cannot use."""

    code = "WH401"


class UnsupportedRelease(WhenceError, ImportError):
    """The release of PyTorch that is installed lacks something private that whence relies on."""

    code = "WH402"


class UnsupportedGraph(WhenceError, ValueError):
    """A graph from elsewhere holds something that a program cannot, or contradicts itself."""

    code = "WH501"


class NotExportable(WhenceError, ValueError):
    """A program holds something that an ExportedProgram cannot."""

    code = "WH502"


class NotStorable(WhenceError, ValueError):
    """A program holds something that a file cannot: a function of Python's, a tensor made of others."""

    code = "WH503"


class UnreadableFile(WhenceError, ValueError):
    """A file holds no program, or one that needs operators or classes that this process does not have."""

    code = "WH504"


class UntriedRelease(UserWarning):
    """The release of PyTorch that is installed is one that nobody has tried whence with."""


class ToldCompiled(UserWarning):
    """A program goes the way of compiled code where eager's needs values, and may compute something else."""


class NotKept(UserWarning):
    """A program is not kept for other processes, or only for those where certain modules are loaded."""


class Noting(AbstractContextManager[None]):
    """Adds a note to any exception that passes through: it stays its own."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            error.add_note(self._text)
