"""What a run does beside a program, for who counts: what no result needs, and what is held for longer.

A head leaves out what a pooler gives, autograd differentiates for a value that the model made a leaf, and
variables of Python hold on to values that nobody reads any more.
"""

from bisect import bisect_right
from collections.abc import Iterable

from torch import fx, nn

from whence._torch.graphs import graph_module, placeholder
from whence._torch.lifetimes import Lifetimes
from whence._torch.operators.schemas import OpOverload, traits
from whence.program.node_records import RECORD, NodeRecord, origin_of
from whence.schema import Phase


def unread_operations(gone: Iterable[fx.Node], name: str) -> fx.GraphModule | None:
    """A graph of the operators among what is `gone`, in order, that read tensors and give no views; what they
    read are its inputs."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gone:
        if not _computes(node):
            continue
        for source in node.all_input_nodes:
            if source not in made:
                made[source] = placeholder(graph, source.name, {"val": source.meta.get("val")})
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta = {"val": node.meta.get("val"), RECORD: NodeRecord(origin_of(node))}
    graph.output(())
    return graph_module(nn.Module(), graph, name) if made else None


def _computes(node: fx.Node) -> bool:
    is_operator = node.op == "call_function" and isinstance(node.target, OpOverload)
    return is_operator and bool(node.all_input_nodes) and traits(node.target).viewed is None


def held_by_python(
    lifetimes: Lifetimes, graph: fx.Graph, gone: Iterable[fx.Node]
) -> dict[str, tuple[str, str]]:
    """Values that are held after all that reads them, and those that are `gone` from the graph: the first and
    the last operation of the graph that runs meanwhile. In a backward autograd holds what it saved."""
    made = lifetimes.made
    there = sorted((node for node in graph.nodes if node in made), key=made.__getitem__)
    moments = [made[node] for node in there]
    found: dict[str, tuple[str, str]] = {}
    for is_left, nodes in ((True, there), (False, gone)):
        for node in nodes:
            begins, ends = made.get(node), lifetimes.gone.get(node)
            if begins is None or ends is None or origin_of(node).phase is Phase.BACKWARD:
                continue
            read = max((made.get(user, 0) for user in node.users), default=begins) if is_left else begins
            at = bisect_right(moments, ends) - 1
            if at < 0 or moments[at] <= read:
                continue
            if origin_of(there[at]).phase is origin_of(node).phase:
                since = node if is_left else there[bisect_right(moments, begins)]
                found[node.name] = since.name, there[at].name
    return found
