"""What a capture knows of its graph: which calls it wrote from one record, while nobody has edited them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

from torch import fx

from whence.program.origins import ORIGIN

_READ: tuple[Callable[[fx.Node], Any], ...] = (
    *map(attrgetter, ("target", "args", "kwargs")),
    lambda node: node.meta.get(ORIGIN),
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
class Known:
    """Copies in a graph, and the graph as it was then: its nodes and, for each, what makes it what it is.

    fx replaces the arguments of a node as a whole, never a part of them, so they are compared by identity.
    """

    copies: Copies
    nodes: Sequence[fx.Node]
    columns: tuple[Sequence[Any], ...]

    def in_graph(self, graph: fx.Graph) -> Copies | None:
        """What is known, unless the graph was edited or is another one."""
        nodes = tuple(graph.nodes)
        if len(nodes) != len(self.nodes) or not all(map(is_, nodes, self.nodes)):
            return None
        now = (map(read, nodes) for read in _READ)
        untouched = all(all(map(is_, then, new)) for then, new in zip(self.columns, now, strict=True))
        return self.copies if untouched else None


def known_of(graph: fx.Graph, copies: Copies) -> Known | None:
    """What is known of a finished graph."""
    if not copies.records:
        return None
    nodes = tuple(graph.nodes)
    return Known(copies, nodes, tuple(tuple(map(read, nodes)) for read in _READ))
