"""What one attempt at a capture takes for given, and the next one where that does not hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from whence.dependence.asking import dismiss
from whence.tracing.answers import Answers


@dataclass(frozen=True)
class Reuse:
    """Whether calls are replayed, whether they are differentiated in the capture, and which classes are not.

    With `composites`, operators that are made of others are recorded whole. `without` gives, for classes
    whose records turned out not to hold, the reason; that of None is for all. `answers` are for code that
    asks whether it is being compiled.
    """

    wanted: bool = True
    joint: bool = False
    composites: bool = False
    without: Mapping[type | None, str] = field(default_factory=dict)
    answers: Answers = field(default_factory=Answers)

    def but_for(self, kind: type | None, why: str) -> "Reuse":
        """The same without one class more; None is every class."""
        return replace(self, without={**self.without, kind: why})

    def but_where(self, condition: object, why: str) -> "Reuse":
        """The same; without any class, for this reason, where the condition holds."""
        return self.but_for(None, why) if condition else self


Assumed = TypeVar("Assumed")
Result = TypeVar("Result")


class AnotherAttempt(Exception):
    """What was taken for given does not hold: the capture begins again with what `change` makes of it."""

    def __init__(self, change: Callable[[Any], Any], why: str = "") -> None:
        super().__init__(why)
        self.change = change


def until_it_holds(assumed: Assumed, attempt: Callable[[Assumed], Result]) -> Result:
    """What an attempt gives whose assumptions hold, each made with what the one before has found."""
    while True:
        try:
            return attempt(assumed)
        except AnotherAttempt as found:
            dismiss(found)
            assumed = found.change(assumed)
