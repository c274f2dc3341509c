"""Everything whence raises on purpose.

    WhenceError
    ├── CaptureError              the model could not be recorded
    │   ├── NotCallable           not a module or a callable, or of a kind that cannot be recorded
    │   ├── UnsupportedInput      an input (or result) is of a type no one registered
    │   ├── InputMismatch         the inputs do not fit the model's signature
    │   ├── DataDependent         a Python decision needs a tensor's value
    │   ├── UnsupportedMutation   an in-place operation that has no functional form
    │   ├── UnsupportedHook       a gradient hook that a program cannot hold
    │   ├── InvalidLoss           the loss is not a scalar, or nothing in it needs a gradient
    │   └── NestedCapture         a capture was started inside a capture
    ├── SelectionError            a pattern or a name that finds nothing
    ├── CallError                 a program or module was called in another way than it was captured
    ├── NotDifferentiable         a backward pass that would give a wrong gradient
    ├── MalformedProgram          a program breaks one of its own rules
    └── UsageError                the command line was given something it cannot use

A model that fails by itself raises its own error, with a note saying that a capture was running and where.
Each error says what happened, where, why, and what to do: `what`, `where`, `why`, `remedy`.
"""

from dataclasses import dataclass


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


class WhenceError(Exception):
    """Base of all errors raised by whence."""

    def __init__(self, what: str, *, where: Place | None = None, why: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where or Place()
        self.why = why
        self.remedy = remedy
        super().__init__(_page(what, self.where, why, remedy))


def _page(what: str, where: Place, why: str, remedy: str) -> str:
    rows = [what]
    rows += [f"  where: {where}"] if str(where) else []
    rows += [f"  why: {why}"] if why else []
    rows += [f"  what to do: {remedy}"] if remedy else []
    return "\n".join(rows)


class CaptureError(WhenceError):
    """The model could not be recorded; it is left as it was."""


class NotCallable(CaptureError):
    """What was given is neither a module nor a callable, or is of a kind that cannot be recorded."""


class UnsupportedInput(CaptureError):
    """An input is neither a tensor, nor a constant, nor a container that pytree knows."""


class InputMismatch(CaptureError):
    """The example inputs do not fit the signature of the model."""


class DataDependent(CaptureError):
    """Python asked for the value of a tensor, which a recording does not have."""


class UnsupportedMutation(CaptureError):
    """An in-place operation has no functional form that keeps the model's numbers."""


class UnsupportedHook(CaptureError):
    """A gradient hook sits on a parameter, where the captured backward and autograd would both run it."""


class InvalidLoss(CaptureError):
    """The loss is not one number, or nothing in it needs a gradient."""


class NestedCapture(CaptureError):
    """A capture was started while this thread was already capturing."""


class SelectionError(WhenceError, LookupError):
    """A pattern, path or name finds nothing, or more than one thing where one was asked for."""


class CallError(WhenceError, TypeError, ValueError):
    """A program, flat module or tree was called in another way than it was captured."""


class NotDifferentiable(WhenceError, RuntimeError):
    """A backward pass was asked for where the recorded program cannot give the right one."""


class MalformedProgram(WhenceError):
    """A program breaks one of its own rules."""


class UsageError(WhenceError):
    """The command line was given something it cannot use."""
