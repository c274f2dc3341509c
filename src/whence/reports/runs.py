"""How often the graphs run that a node holds: the branches of a `cond`, what a loop or a map repeats."""

from collections.abc import Iterator, Mapping

from torch import Tensor, fx

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import op_name
from whence._torch.pytrees import tree_flatten
from whence.reports.flops import shape_at

_OVER: Mapping[str, int] = {"scan": 2, "map_impl": 1}
"""Operators that run a graph for each item of an argument, and which argument that is."""


def held_graphs(node: fx.Node) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """The graphs that a node runs, each with the node that reads it."""
    for source in node.all_input_nodes:
        if (inner := nested_graph(source)) is not None:
            yield source, inner


def is_branch(node: fx.Node) -> bool:
    """Whether one of the graphs that a node holds runs, and the others do not."""
    return op_name(node.target) == "cond"


def runs_of(node: fx.Node, sizes: Mapping[str, int]) -> int | None:
    """How often a node runs each graph that it holds; None where that is not known: once or more."""
    if is_branch(node):
        return 1
    place = _OVER.get(op_name(node.target))
    if place is None:
        return None
    items = [source.meta.get("val") for source in tree_flatten(node.args[place])[0]]
    lengths = {shape_at(item, sizes)[0] for item in items if isinstance(item, Tensor)}
    return lengths.pop() if len(lengths) == 1 else None


def trips_of(reading: fx.Node, sizes: Mapping[str, int]) -> int:
    """How often a graph runs, by the node that reads it; once where nobody knows."""
    users = [node for node in reading.users if node.op == "call_function"]
    return sum(runs_of(node, sizes) or 1 for node in users) if users else 1
