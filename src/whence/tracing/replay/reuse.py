"""What may be replayed in a capture."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Reuse:
    """Whether calls are replayed, whether they are differentiated in the capture, and which classes are not.

    With `composites`, operators that are made of others are recorded whole. `without` gives, for classes
    whose records turned out not to hold, the reason; that of None is for all.
    """

    wanted: bool = True
    joint: bool = False
    composites: bool = False
    without: Mapping[type | None, str] = field(default_factory=dict)

    def but_for(self, kind: type | None, why: str) -> "Reuse":
        """The same without one class more; None is every class."""
        return replace(self, without={**self.without, kind: why})
