"""What passes did to a program, in order: a sequence that prints as a page."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from whence._torch.operators.schemas import op_name
from whence.program.node_records import origin_of
from whence.program.queries.notebook import OpensInNotebook
from whence.program.queries.plain import AsJSON, plain_fields

_MOST_CALLS = 4


@dataclass(frozen=True)
class OperatorChange(AsJSON):
    """How many operations of one operator a pass made and took away, and the calls in which they are.

    An operation that was given another operator counts for both. The program's own call has no name.
    """

    operator: str
    added: int = 0
    removed: int = 0
    calls: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = [f"-{self.removed:,}"] * bool(self.removed) + [f"+{self.added:,}"] * bool(self.added)
        shown = ", ".join(call or "(root)" for call in self.calls[:_MOST_CALLS])
        rest = len(self.calls) - _MOST_CALLS
        more = f" and {rest:,} more" if rest > 0 else ""
        return f"{' '.join(counts):>9}  {self.operator}  in {shown}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return plain_fields(self, "operator", "added", "removed", "calls")


@dataclass(frozen=True)
class PassEntry(AsJSON):
    """One pass: its name, the pass as it is printed, and how many operations it left.

    `added` are those that it made or gave another operation, `removed` those that are gone, and `changes`
    says which, by operator. What a block of `track` did is not printed: `options` is empty.
    """

    name: str
    options: str
    operations: int
    added: int
    removed: int
    changes: tuple[OperatorChange, ...] = ()

    def __str__(self) -> str:
        told = f" ({self.options})" if self.options else ""
        return f"{self.name}{told}: {self.removed:,} gone, {self.added:,} new, {self.operations:,} operations"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return plain_fields(self, "name", "options", "operations", "added", "removed", "changes")


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


def changes_of(removed: Sequence[fx.Node], added: Iterable[fx.Node]) -> tuple[OperatorChange, ...]:
    """What changed from the operations of before to those of behind, by operator."""
    counts: dict[str, tuple[int, int, dict[str, None]]] = {}
    for step, nodes in ((-1, removed), (1, added)):
        for node in nodes:
            if node.op == "call_function":
                gone, made, calls = counts.get(op_name(node.target), (0, 0, {}))
                place = origin_of(node).place
                calls["" if place is None else str(place)] = None
                counts[op_name(node.target)] = gone + (step < 0), made + (step > 0), calls
    return tuple(
        OperatorChange(operator, made, gone, tuple(calls)) for operator, (gone, made, calls) in counts.items()
    )
