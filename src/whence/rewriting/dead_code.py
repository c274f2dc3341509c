"""The nodes of a recorded graph that nothing needs, and the order of its placeholders."""

from collections.abc import Sequence, Set
from itertools import pairwise

from torch import fx, nn

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import keeps_its_place


def drop_unused(graph: fx.Graph, nested: nn.Module, repeated: Set[fx.Node], keep: Set[str]) -> None:
    """Remove operations whose results nothing reads, but for those called `keep`; those that draw or act
    stay, unless repeated. `nested` holds the graphs that nodes read."""
    for node in reversed(list(graph.nodes)):
        if node.op == "output" or node.users or node.name in keep:
            continue
        if node in repeated or not _does_something(node, nested):
            graph.erase_node(node)


def _does_something(node: fx.Node, nested: nn.Module) -> bool:
    """Whether a run is another one without the operation, although nobody reads its results."""
    if keeps_its_place(node.target, node.args, node.kwargs):
        return True
    read = (nested_graph(source, nested) for source in node.all_input_nodes)
    graphs = (inner for inner in read if inner is not None)
    return any(_does_something(part, inner) for inner in graphs for part in inner.graph.nodes)


def placeholders_of(graph: fx.Graph) -> dict[str, fx.Node]:
    return {node.name: node for node in graph.nodes if node.op == "placeholder"}


def order_placeholders(graph: fx.Graph, names: Sequence[str]) -> None:
    """Let a graph begin with its placeholders, in this order."""
    placeholders = placeholders_of(graph)
    first = next(iter(graph.nodes))
    if names and placeholders[names[0]] is not first:
        first.prepend(placeholders[names[0]])
    for earlier, later in pairwise(names):
        placeholders[earlier].append(placeholders[later])
