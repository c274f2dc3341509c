"""The graph collections of Model Explorer, whose fields are those of its `graph_builder` 0.1.34.

https://github.com/google-ai-edge/model-explorer
"""

from collections.abc import Iterator, Mapping
from typing import Any

from whence.reports.formats.nodes import CallsAround, Row, cost_with_inside, reads, short
from whence.reports.numbers import scaled

SLASH = "\u2215"
"""Stands for a slash in the name of a module: the format splits namespaces there."""


def model_explorer(figures: Row) -> dict[str, Any]:
    """One collection with one graph: layers are phases, then modules; groups carry what `report` says."""
    program = figures["program"]
    nodes = [node for node in program["nodes"] if node["op"] != "output"]
    kept = {row["node"]: row["bytes"] for row in figures["memory"]["kept"]}
    sites, inputs = CallsAround(program["calls"]), {row["name"]: row for row in program["inputs"]}
    graph = {
        "id": program["name"],
        "nodes": [
            {
                "id": node["name"],
                "label": inputs[node["name"]]["path"] if node["name"] in inputs else short(node["target"]),
                "namespace": _namespace(node, sites, inputs),
                "attrs": list(_attributes(node, figures, kept)),
                "incomingEdges": [
                    {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(at)}
                    for at, name in enumerate(reads(node))
                ],
                "outputsMetadata": [
                    {"id": "0", "attrs": [_attribute("made", figures["made"][node["name"]])]}
                ],
            }
            for node in nodes
        ],
        "groupNodeAttributes": _groups(figures),
    }
    return {"label": program["name"], "graphs": [graph]}


def _namespace(node: Row, sites: CallsAround, inputs: Mapping[str, Row]) -> str:
    if node["name"] in inputs:
        return f"inputs/{inputs[node['name']]['kind']}"
    chain = sites.chain(node)
    site = CallsAround.site(chain[-1]) if chain else ""
    return "/".join([node["origin"]["phase"], *_segments(site)])


def _segments(site: str) -> list[str]:
    return [part.replace("/", SLASH) for part in site.split(".")] if site else []


def _attribute(key: str, value: Any) -> dict[str, Any]:
    return {"key": key, "value": value if isinstance(value, dict) else str(value)}


def _attributes(node: Row, figures: Row, kept: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    origin = node["origin"]
    yield _attribute("operator", node["target"])
    yield _attribute("origin", f"{origin['quality']}, {' + '.join(origin['calls']) or 'outside any module'}")
    if origin["source"]:
        yield _attribute("line", origin["source"])
    if origin["forward"]:
        yield _attribute("forward", {"type": "node_ids", "nodeIds": [origin["forward"]]})
    if node["name"] in figures["costs"]:
        flops, read, written, _ = cost_with_inside(node, figures)
        yield _attribute("FLOPs", _figure(flops))
        yield _attribute("bytes moved", _figure(read + written))
    if node["name"] in kept:
        yield _attribute("kept bytes", _figure(kept[node["name"]]))


def _figure(value: float) -> str:
    return scaled(value).rstrip()


def _groups(figures: Row) -> dict[str, dict[str, str]]:
    """What the report says of a call, for the groups that its nodes make; `""` is the whole graph."""
    found: dict[str, dict[str, str]] = {}
    phases = sorted({node["origin"]["phase"] for node in figures["program"]["nodes"]})
    named = ("path", "index", "depth")
    for row, call in zip(figures["rows"], figures["program"]["calls"], strict=True):
        told = {
            key: _figure(value) if isinstance(value, (int, float)) else str(value)
            for key, value in row.items()
        }
        texts = {key.replace("_", " "): text for key, text in told.items() if key not in named}
        if call["number"] == 0:
            found[""] = texts
        segments = _segments(CallsAround.site(call))
        if segments:
            found |= {"/".join([phase, *segments]): texts for phase in phases}
    return found
