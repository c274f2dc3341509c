"""A program that looks before it runs."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from whence._torch.observe.compile_flags import unread
from whence._torch.observe.generators import set_states, states
from whence._torch.plain_values import same_objects
from whence.errors import Place, StaleCapture
from whence.guards.check import Checked
from whence.guards.memory import Remembered
from whence.program import FlatProgram
from whence.program.guards.rows import Violation
from whence.schema import OnViolation

_SHOWN = 10
_REMEDY_OF_STEPS = "capture the step again, or undo the change; what varies, pass as an argument of the step"
_REMEDY = "capture again, undo the change, or call program.guarded(model, on_violation='recapture')"


@dataclass(frozen=True)
class Ways:
    """How a guarded program does what other rooms know: check, make a module over live state, capture."""

    check: Callable[[FlatProgram, tuple[Any, ...], dict[str, Any], Remembered], Checked]
    module: Callable[[FlatProgram], Callable[..., Any]]
    capture: Callable[[tuple[Any, ...], dict[str, Any]], FlatProgram]


@dataclass
class _Path:
    """A program for one way through the model, with what its last check met and the module that runs it."""

    program: FlatProgram
    memory: Remembered = field(default_factory=Remembered)
    module: Callable[..., Any] | None = None
    tensors: Sequence[Tensor] = ()


class Guarded:
    """Calls a captured program where its guards hold, or a variant of it, and does as asked where none do.

    `program` is the one in use; a recapture replaces it. Where values decided otherwise it stays beside the
    new one, and calls try each, the last first (`programs`). Calls return what the flat module returns: what
    the model returns, or `(loss, outputs)` for a program with a loss function.
    """

    def __init__(
        self, program: FlatProgram, model: Callable[..., Any], on_violation: OnViolation, ways: Ways
    ) -> None:
        self.model = model
        self.on_violation = on_violation
        self._ways = ways
        self._paths = [*map(_Path, (program, *program.variants))]

    @property
    def program(self) -> FlatProgram:
        """The program that ran last."""
        return self._paths[0].program

    @property
    def programs(self) -> tuple[FlatProgram, ...]:
        """The programs of all ways that values and sizes decided, the last used first."""
        return tuple(path.program for path in self._paths)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check, then run; raises `StaleCapture` where a guard does not hold and that was asked for."""
        stale: list[tuple[_Path, StaleCapture]] = []
        try:
            return unread(self._called, stale, args, kwargs)
        finally:
            stale.clear()  # an error holds the frames that it left, which would hold it

    def _called(
        self, stale: list[tuple[_Path, StaleCapture]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        for path in self._paths:
            try:
                result = self._checked_run(path, args, kwargs)
            except StaleCapture as error:
                stale.append((path, error))
            else:
                self._paths.sort(key=lambda other: other is not path)
                return result
        if self.on_violation is OnViolation.RAISE:
            raise _nearest(stale)
        if self.on_violation is OnViolation.WARN:
            warnings.warn(f"{_nearest(stale)}\nthe model itself runs instead", stacklevel=3)
            return self._eager(args, kwargs)
        kept = [path for path, error in stale if not error.violations]
        program = self._ways.capture(args, kwargs)
        self._paths = [*map(_Path, (program, *program.variants)), *kept]
        path = self._paths[0]
        return self._run(path, self._ways.check(path.program, args, kwargs, path.memory), args, kwargs)

    def check(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> list[Violation]:
        """What a call with these arguments would find violated of the program in use.

        The same as `program.check(model, args, kwargs)`, for less: what the last check met is remembered.
        """
        path = self._paths[0]
        return self._ways.check(path.program, args, kwargs or {}, path.memory).violations

    def _checked_run(self, path: _Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check, then run; raises `StaleCapture`, with random numbers as they were."""
        checked = self._ways.check(path.program, args, kwargs, path.memory)
        if checked.violations:
            raise stale_capture(path.program, checked)
        if path.program.circumstances.decide is None:
            return self._run(path, checked, args, kwargs)
        before = states()
        try:
            return self._run(path, checked, args, kwargs)
        except StaleCapture:
            set_states(before)
            raise

    def _run(self, path: _Path, checked: Checked, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on the tensors that the model has now: a parameter may have been replaced by its like.

        A model that changes, when it runs, what it reads, runs itself: a program would leave that out.
        """
        if checked.changes:
            return self._eager(args, kwargs)
        if path.module is None or not same_objects(checked.tensors, path.tensors):
            path.module, path.tensors = self._ways.module(path.program), checked.tensors
        return path.module(*args, **kwargs)

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = self.model(*args, **kwargs)
        if self.program.loss_function is None:
            return outputs
        return self.program.loss_function(outputs), outputs


def _nearest(stale: Sequence[tuple[_Path, StaleCapture]]) -> StaleCapture:
    """What is said of the program of which the least is otherwise: of a variant, for its sizes."""
    return min((error for _, error in stale), key=lambda error: len(error.violations))


def stale_capture(program: FlatProgram, checked: Checked) -> StaleCapture:
    """The error that says which guards do not hold, all of them."""
    first = checked.violations[0].guard
    module = None if first.module is None else str(first.module)
    line = None if first.source is None else str(first.source)
    shown = [violation.change for violation in checked.violations[:_SHOWN]]
    more = len(checked.violations) - len(shown)
    return StaleCapture(
        f"the capture of {program.name} no longer holds",
        where=Place(module, line),
        why="\n       ".join([*shown, *([f"and {more} more"] if more else [])]),
        remedy=_REMEDY if program.step is None else _REMEDY_OF_STEPS,
        violations=tuple(checked.violations),
    )
