"""What passes did to a program, in order: a sequence that prints as a page."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from whence._torch.operators.schemas import op_name
from whence.program.node_records import origin_of
from whence.program.plain import AsJSON, plain_fields
from whence.program.queries.notebook import OpensInNotebook

_MOST_CALLS = 4


@dataclass(frozen=True)
class OperatorChange(AsJSON):
    """How many operations of one operator a pass made, took away and edited, and the calls in which they are.

    An operation that was given another operator is made and taken away; one that was given other arguments
    is `edited`. The program's own call has no name.
    """

    operator: str
    added: int = 0
    removed: int = 0
    calls: tuple[str, ...] = ()
    edited: int = 0

    def __str__(self) -> str:
        signed = {"-": self.removed, "+": self.added, "~": self.edited}
        counts = [f"{sign}{count:,}" for sign, count in signed.items() if count]
        shown = ", ".join(call or "(root)" for call in self.calls[:_MOST_CALLS])
        rest = len(self.calls) - _MOST_CALLS
        more = f" and {rest:,} more" if rest > 0 else ""
        return f"{' '.join(counts):>9}  {self.operator}  in {shown}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return plain_fields(self, "operator", "added", "removed", "edited", "calls")


@dataclass(frozen=True)
class PassEntry(AsJSON):
    """One pass: its name, the pass as it is printed, and how many operations it left.

    `added` are those that it made, `removed` those that are gone, `edited` those that it gave other
    arguments, and `changes` says which, by operator. An operation that was given another operator is gone,
    and new; that one reads what stands in the place of what is gone is no edit. What a block of `track` did
    is not printed: `options` is empty.
    """

    name: str
    options: str
    operations: int
    added: int
    removed: int
    changes: tuple[OperatorChange, ...] = ()
    edited: int = 0

    def __str__(self) -> str:
        told = f" ({self.options})" if self.options else ""
        edited = f"{self.edited:,} edited, " if self.edited else ""
        counts = f"{self.removed:,} gone, {self.added:,} new, {edited}{self.operations:,} operations"
        return f"{self.name}{told}: {counts}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return plain_fields(self, "name", "options", "operations", "added", "removed", "edited", "changes")


class History(tuple[PassEntry, ...], OpensInNotebook, AsJSON):
    """The passes that a program went through, the first first; it prints as a page."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<History: {', '.join(entry.name for entry in self) or 'as it was captured'}>"

    def __str__(self) -> str:
        return "\n".join(self._lines()) or "as it was captured"

    def _lines(self) -> Iterator[str]:
        for number, entry in enumerate(self):
            yield f"{number:>3}  {entry}"
            yield from map(str, entry.changes)

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data."""
        return [entry.to_dict() for entry in self]


def changes_of(
    removed: Iterable[fx.Node], added: Iterable[fx.Node], edited: Iterable[fx.Node]
) -> tuple[OperatorChange, ...]:
    """What changed from the operations of before to those of behind, by operator."""
    rows: dict[str, tuple[Counter[str], dict[str, None]]] = {}
    for what, nodes in (("removed", removed), ("added", added), ("edited", edited)):
        for node in nodes:
            if node.op == "call_function":
                counts, calls = rows.setdefault(op_name(node.target), (Counter(), {}))
                counts[what] += 1
                call = origin_of(node).made_in
                calls["" if call is None else str(call)] = None
    return tuple(OperatorChange(name, calls=tuple(calls), **counts) for name, (counts, calls) in rows.items())
