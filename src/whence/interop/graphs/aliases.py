"""Which values of a graph may share memory, and which are written; on what schemas and the table say."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from whence._torch.export.programs import looks_into
from whence._torch.graphs import nodes_in
from whence._torch.operators.schemas import written_nodes


@dataclass
class Aliases:
    """Groups of values that may share memory; a group is named by one of its nodes."""

    around: dict[fx.Node, fx.Node] = field(default_factory=dict)
    written: set[fx.Node] = field(default_factory=set)

    def group(self, node: fx.Node) -> fx.Node:
        while node in self.around:
            node = self.around[node]
        return node

    def join(self, one: fx.Node, other: fx.Node) -> None:
        """Two values may share memory."""
        left, right = self.group(one), self.group(other)
        if left is not right:
            self.around[left] = right


def aliases_in(graph: fx.Graph) -> Aliases:
    """Follow views and writes through a graph."""
    found = Aliases()
    for node in graph.nodes:
        if node.op == "call_function":
            for source in looked_into(node):
                found.join(node, source)
            found.written.update(written_nodes(node))
    return found


def looked_into(node: fx.Node) -> Iterator[fx.Node]:
    """The values that the results of an operation may look into, as its schema says."""
    positions = (0,) if node.target is operator.getitem else looks_into(node.target)
    for position in positions:
        yield from nodes_in(node.args[position] if position < len(node.args) else None)
