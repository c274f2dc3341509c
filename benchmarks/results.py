"""What one row of the table says: what was measured, the target, and the verdict. No torch here."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a target bounds."""

    FASTER = "times faster"  # PyTorch's time over ours, at least
    LONGER = "times as long"  # our time over PyTorch's, at most
    AMOUNT = "amount"  # ours alone, at most


class Verdict(StrEnum):
    """How a value stands to its target."""

    MET = "met"
    MISSED = "missed"
    FAR = "missed by half"


@dataclass(frozen=True)
class Target:
    """A bound; `FASTER` from below, the others from above."""

    kind: Kind
    bound: float

    def verdict(self, value: float) -> Verdict:
        """Missed by half: less than half as fast as asked for, or more than twice what is allowed."""
        good, asked = (value, self.bound) if self.kind is Kind.FASTER else (self.bound, value)
        if good >= asked:
            return Verdict.MET
        return Verdict.MISSED if 2 * good >= asked else Verdict.FAR


@dataclass(frozen=True)
class Sample:
    """The median of some runs."""

    median: float
    repeats: int


@dataclass(frozen=True)
class Figures:
    """What was measured. A floor has no figure of ours, a row that cannot be measured yet has none at all."""

    ours: Sample | None
    theirs: Sample | None
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Subject:
    """What is measured, and against what; rows of one group stand together."""

    group: str
    name: str
    what: str
    against: str = ""
    layers: int | None = None


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    subject: Subject
    target: Target | None
    figures: Figures

    @property
    def value(self) -> float | None:
        """What the target bounds: a ratio, or the amount."""
        ours, theirs = self.figures.ours, self.figures.theirs
        if self.target is None or ours is None:
            return None
        if self.target.kind is Kind.AMOUNT or theirs is None:
            return ours.median
        if self.target.kind is Kind.FASTER:
            return theirs.median / ours.median
        return ours.median / theirs.median

    @property
    def verdict(self) -> Verdict | None:
        """None where there is no target or no figure of ours."""
        if self.target is None or self.value is None:
            return None
        return self.target.verdict(self.value)

    def to_dict(self) -> dict[str, Any]:
        """Everything, with value and verdict for those who only read."""
        return {**asdict(self), "value": self.value, "verdict": self.verdict}


def result_from_dict(data: dict[str, Any]) -> Result:
    """The inverse of `Result.to_dict`; value and verdict follow from the rest."""
    figures, target = data["figures"], data["target"]
    return Result(
        Subject(**data["subject"]),
        Target(Kind(target["kind"]), target["bound"]) if target else None,
        Figures(_sample(figures["ours"]), _sample(figures["theirs"]), figures["unit"], figures["note"]),
    )


def _sample(data: dict[str, Any] | None) -> Sample | None:
    return Sample(**data) if data else None


def exit_status(results: Iterable[Result], *, failing: frozenset[Verdict]) -> int:
    """1 when some verdict is among the failing ones."""
    return int(any(result.verdict in failing for result in results))


def faster(bound: float) -> Target:
    """At least `bound` times faster than PyTorch."""
    return Target(Kind.FASTER, bound)


def longer(bound: float) -> Target:
    """At most `bound` times PyTorch's time."""
    return Target(Kind.LONGER, bound)


def amount(bound: float) -> Target:
    """At most `bound` in the unit of the row."""
    return Target(Kind.AMOUNT, bound)
