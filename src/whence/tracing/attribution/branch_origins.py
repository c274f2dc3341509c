"""Origins of what the functions compute that operators run: branches, and bodies of loops."""

from torch import fx, nn

from whence._torch.graphs import nested_graph
from whence._torch.higher_order.function_graphs import stop_playing
from whence._torch.operators.schemas import HigherOrderOperator
from whence.program.node_records import has_origin, origin_of, set_origin
from whence.provenance import Origin
from whence.schema import Quality


def attribute_branches(graph: fx.Graph, nested: nn.Module) -> None:
    """Give what functions compute to the call that runs the operator, with an origin where it has none."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
            continue
        origin = origin_of(node)
        for reader in node.all_input_nodes:
            if (inner := nested_graph(reader, nested)) is not None:
                set_origin(reader, origin)
                stop_playing(inner)
                _attribute_inside(inner.graph, origin)
                attribute_branches(inner.graph, inner)


def _attribute_inside(graph: fx.Graph, of: Origin) -> None:
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        if has_origin(node) and origin_of(node).phase is of.phase:
            set_origin(node, origin_of(node)._replace(place=of.place))
        else:
            set_origin(node, of._replace(quality=Quality.INFERRED))
