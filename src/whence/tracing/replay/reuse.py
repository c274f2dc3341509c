"""What one attempt at a capture takes for given."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
