"""What is not captured with every bit of eager's: each exception with its reason, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exceptions:
    """Operators or modules with one outcome, for one reason."""

    outcome: str
    why: str
    names: frozenset[str]


def _rows(outcome: str, why: str, names: str) -> Exceptions:
    return Exceptions(outcome, why, frozenset(names.split()))


OPERATORS: tuple[Exceptions, ...] = ()
MODULES: tuple[Exceptions, ...] = ()


def expected_of(table: tuple[Exceptions, ...], name: str) -> set[str]:
    """The outcomes that are known of a name."""
    return {row.outcome for row in table if name in row.names}
