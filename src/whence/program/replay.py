"""Which calls of a capture were run, and which were written once more from a record."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

from torch import fx

from whence._torch.plain_values import same_objects
from whence.program.node_records import RECORD
from whence.program.plain import AsJSON, plain_fields

_READ: tuple[Callable[[fx.Node], Any], ...] = (
    *map(attrgetter, ("target", "args", "kwargs")),
    lambda node: node.meta.get(RECORD),
)


@dataclass(frozen=True)
class Copies:
    """Calls that were written from one record.

    `records` gives for a call, by number, what it shares with those written like it; `positions` says for
    each node that was written which one of the record it is.
    """

    records: Mapping[int, Hashable]
    positions: Mapping[fx.Node, int]


@dataclass(frozen=True, eq=False)
class GraphCopies:
    """Copies in a graph, and the graph as it was then: its nodes and, for each, what makes it what it is.

    fx replaces the arguments of a node as a whole, never a part of them, so they are compared by identity.
    """

    copies: Copies
    nodes: Sequence[fx.Node]
    columns: tuple[Sequence[Any], ...]

    def in_graph(self, graph: fx.Graph) -> Copies | None:
        """What is known, unless the graph was edited or is another one."""
        nodes = tuple(graph.nodes)
        if not same_objects(nodes, self.nodes):
            return None
        now = (map(read, nodes) for read in _READ)
        untouched = all(all(map(is_, then, new)) for then, new in zip(self.columns, now, strict=True))
        return self.copies if untouched else None


def graph_copies(graph: fx.Graph, copies: Copies) -> GraphCopies | None:
    if not copies.records:
        return None
    nodes = tuple(graph.nodes)
    return GraphCopies(copies, nodes, tuple(tuple(map(read, nodes)) for read in _READ))


@dataclass(frozen=True, slots=True)
class ClassReplay(AsJSON):
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
        return {**plain_fields(self, "type", "traced", "replayed"), "reasons": dict(self.reasons)}


@dataclass(frozen=True)
class Replays(AsJSON):
    """One row for each class of modules that were called, in the order of their first calls.

    Empty where nothing was to be replayed (`reuse=False`). `known` are calls that were recorded as one.
    """

    rows: tuple[ClassReplay, ...] = ()
    known: GraphCopies | None = field(default=None, repr=False, compare=False)

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
