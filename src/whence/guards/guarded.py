"""A program that looks before it runs."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

from whence.errors import Place, StaleCapture
from whence.guards.check import Checked
from whence.guards.memory import Remembered
from whence.program import Program
from whence.schema import OnViolation

_SHOWN = 10
_REMEDY = "capture again, undo the change, or call program.guarded(model, on_violation='recapture')"


@dataclass(frozen=True)
class Ways:
    """How a guarded program does what other rooms know: check, make a module over live state, capture."""

    check: Callable[[Program, tuple[Any, ...], dict[str, Any], Remembered], Checked]
    module: Callable[[Program], Callable[..., Any]]
    capture: Callable[[tuple[Any, ...], dict[str, Any]], Program]


class Guarded:
    """Calls a captured program where its guards hold, and does as asked where they do not.

    `program` is the one in use; a recapture replaces it. Calls return what the flat module returns:
    what the model returns, or `(loss, outputs)` for a program with a loss function.
    """

    def __init__(
        self, program: Program, model: Callable[..., Any], on_violation: OnViolation, ways: Ways
    ) -> None:
        self.program = program
        self.model = model
        self.on_violation = on_violation
        self._ways = ways
        self._memory = Remembered()
        self._module: Callable[..., Any] | None = None
        self._tensors: Sequence[Tensor] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check, then run; raises `StaleCapture` where a guard does not hold and that was asked for."""
        checked = self._ways.check(self.program, args, kwargs, self._memory)
        if not checked.violations:
            return self._run(checked, args, kwargs)
        stale = stale_capture(self.program, checked)
        if self.on_violation is OnViolation.RAISE:
            raise stale
        if self.on_violation is OnViolation.WARN:
            warnings.warn(f"{stale}\nthe model itself runs instead", stacklevel=2)
            return self._eager(args, kwargs)
        self.program, self._module = self._ways.capture(args, kwargs), None
        return self._run(self._ways.check(self.program, args, kwargs, self._memory), args, kwargs)

    def _run(self, checked: Checked, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on the tensors that the model has now: a parameter may have been replaced by its like.

        A model that changes, when it runs, what it reads, runs itself: a program would leave that out.
        """
        if checked.changes:
            return self._eager(args, kwargs)
        if self._module is None or not _are(checked.tensors, self._tensors):
            self._module, self._tensors = self._ways.module(self.program), checked.tensors
        return self._module(*args, **kwargs)

    def _eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = self.model(*args, **kwargs)
        if self.program.loss_function is None:
            return outputs
        return self.program.loss_function(outputs), outputs


def _are(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


def stale_capture(program: Program, checked: Checked) -> StaleCapture:
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
        remedy=_REMEDY if program.step is None else "capture the step again, or undo the change",
        violations=tuple(checked.violations),
    )
