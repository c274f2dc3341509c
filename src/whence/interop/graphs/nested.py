"""Graphs of branches and loops: what they may not do, and copies that origins can be written on."""

from collections.abc import Iterator

from torch import fx

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import op_name
from whence.errors import Fault
from whence.interop.graphs.aliases import looked_into, written_by
from whence.interop.graphs.faults import place_of
from whence.interop.graphs.inline import WRAPPERS


def nested_writes(module: fx.GraphModule) -> Iterator[Fault]:
    """Writes in a branch or loop to what it takes from outside."""
    for node in module.graph.nodes:
        inner = nested_graph(node)
        if inner is not None:
            if not all(op_name(user.target) in WRAPPERS for user in node.users):
                yield from _writes_outside(inner)
            yield from nested_writes(inner)


def _writes_outside(module: fx.GraphModule) -> Iterator[Fault]:
    outside = {node for node in module.graph.nodes if node.op == "placeholder"}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if not outside.isdisjoint(written_by(node)):
            yield Fault(
                f"{op_name(node.target)} writes to a value from outside its branch or loop",
                where=place_of(node),
                why="in a program nothing changes its inputs, and the graph of a branch stays as it is",
                remedy="return the new value from the branch, and write it outside",
            )
        if not outside.isdisjoint(looked_into(node)):
            outside.add(node)
