"""The graph as one of NetworkX: nodes by name, with what is known of each; an edge for each value read."""

import importlib
from typing import Any

from whence.reports.formats.nodes import CallsAround, Row, cost_with_inside, reads


def network(figures: Row) -> Any:
    """A `networkx.MultiDiGraph`, whose attributes are numbers and texts, so that it can be written."""
    program = figures["program"]
    graph = importlib.import_module("networkx").MultiDiGraph(name=program["name"])
    sites, kinds = CallsAround(program["calls"]), {row["name"]: row for row in program["inputs"]}
    for node in program["nodes"]:
        graph.add_node(node["name"], **_known(node, figures, sites, kinds))
    for node in program["nodes"]:
        for position, name in enumerate(reads(node)):
            graph.add_edge(name, node["name"], position=position)
    return graph


def _known(node: Row, figures: Row, sites: CallsAround, kinds: Row) -> dict[str, Any]:
    origin, chain = node["origin"], sites.chain(node)
    flops, read, written, _ = cost_with_inside(node, figures)
    found = {
        "op": node["op"],
        "target": node["target"],
        "made": figures["made"].get(node["name"], ""),
        "phase": origin["phase"],
        "call": CallsAround.site(chain[-1]) if chain else "",
        "type": chain[-1]["type"] if chain else "",
        "quality": origin["quality"],
        "source": origin["source"] or "",
        "forward": origin["forward"] or "",
        "flops": flops,
        "bytes": read + written,
    }
    row = kinds.get(node["name"])
    return found if row is None else {**found, "kind": row["kind"], "path": row["path"]}
