"""What passes did to a program since it was captured."""

from dataclasses import dataclass
from typing import Any

from whence.program.queries.plain import plain_fields


@dataclass(frozen=True)
class PassEntry:
    """One pass: its name, the pass as it is printed, and how many operations it left.

    `added` are those that it made or gave another operation, `removed` those that are gone. What a block of
    `track` did is not printed: `options` is empty.
    """

    name: str
    options: str
    operations: int
    added: int
    removed: int

    def __str__(self) -> str:
        told = f" ({self.options})" if self.options else ""
        return f"{self.name}{told}: {self.removed:,} gone, {self.added:,} new, {self.operations:,} operations"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return plain_fields(self, "name", "options", "operations", "added", "removed")
