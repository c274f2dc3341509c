"""Which calls of a capture were run, and which were written once more from a record."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClassReplay:
    """How often modules of one class were called, and how many of these calls were replayed.

    `reasons` are why others had to run, each with the number of calls; the first call of its kind runs
    without one.
    """

    type: str
    traced: int
    replayed: int
    reasons: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        why = "; ".join(f"{reason} ({count})" for reason, count in self.reasons)
        counts = f"{self.type}: {self.traced} traced, {self.replayed} replayed"
        return f"{counts}: {why}" if why else counts

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "type": self.type,
            "traced": self.traced,
            "replayed": self.replayed,
            "reasons": dict(self.reasons),
        }


@dataclass(frozen=True)
class Replays:
    """One row for each class of modules that were called, in the order of their first calls.

    Empty where nothing was to be replayed (`reuse=False`).
    """

    rows: tuple[ClassReplay, ...] = ()

    def __iter__(self) -> Iterator[ClassReplay]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, kind: str) -> ClassReplay:
        """The row of a class; raises `KeyError` for one that was not called."""
        found = next((row for row in self.rows if row.type == kind), None)
        if found is None:
            raise KeyError(f"no {kind} was called")
        return found

    @property
    def replayed(self) -> int:
        """How many calls were replayed in all."""
        return sum(row.replayed for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data."""
        return [row.to_dict() for row in self.rows]
