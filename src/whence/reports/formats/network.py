"""The graph as one of NetworkX: nodes by name, with what is known of each; an edge for each value read."""

import importlib
from typing import Any

from whence.reports.formats.nodes import Drawn, EnclosingCalls, Row, drawn, forward_of

_NOTHING = (0, 0, 0, 0.0)


def network(figures: Row) -> Any:
    """A `networkx.MultiDiGraph`, whose attributes are numbers and texts, so that it can be written.

    Edges of the kind `graph` lead from what a nested graph returns to the node that holds the graph, which
    those read that run it. FLOPs and bytes of all nodes add up to those of `cost()`: what runs graphs has
    none itself, and in a branch that is `idle`, since the largest one counts, no node has any.
    """
    program = figures["program"]
    graph = importlib.import_module("networkx").MultiDiGraph(name=program["name"])
    sites, kinds = EnclosingCalls(program["calls"]), {row["name"]: row for row in program["inputs"]}
    nodes = list(drawn(program["nodes"]))
    for node in nodes:
        graph.add_node(node.name, **_known(node, figures, sites, kinds), forward=forward_of(node, nodes))
    for node in nodes:
        for position, name in enumerate(node.reads()):
            graph.add_edge(name, node.name, position=position, kind="value")
        if node.row["op"] == "output" and node.holder:
            graph.add_edge(node.name, node.holder, position=0, kind="graph")
    return graph


def _known(node: Drawn, figures: Row, sites: EnclosingCalls, kinds: Row) -> dict[str, Any]:
    origin, chain = node.row["origin"], sites.chain(node)
    is_idle = node.name in figures["idle"]
    flops, read, written, _ = _NOTHING if is_idle else figures["costs"].get(node.name, _NOTHING)
    found = {
        "op": node.row["op"],
        "target": node.row["target"],
        "graph": node.holder,
        "made": figures["made"].get(node.name, ""),
        "phase": origin["phase"],
        "call": EnclosingCalls.site(chain[-1]) if chain else "",
        "type": chain[-1]["type"] if chain else "",
        "quality": origin["quality"],
        "source": origin["source"] or "",
        "flops": flops,
        "bytes": read + written,
        "idle": is_idle,
    }
    row = kinds.get(node.name)
    return found if row is None else {**found, "kind": row["kind"], "path": row["path"]}
