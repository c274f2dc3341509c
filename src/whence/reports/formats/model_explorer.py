"""The graph collections and the node data of Model Explorer, with the fields of its `graph_builder` and
`node_data_builder` 0.1.34.

https://github.com/google-ai-edge/model-explorer
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whence.reports.formats.nodes import (
    Drawn,
    EnclosingCalls,
    Row,
    by_graph,
    cost_with_inside,
    drawn,
    forward_of,
    short,
)
from whence.reports.numbers import scaled

SLASH = "\u2215"
"""Stands for a slash in the name of a module: the format splits namespaces there."""


def model_explorer(figures: Row) -> dict[str, Any]:
    """One collection: layers are phases, then modules; groups carry what `report` says.

    Graphs that nodes run are graphs of their own, to which those nodes lead.
    """
    name = figures["program"]["name"]
    groups, drawing = _report_groups(figures), _Drawing(figures)
    return {"label": name, "graphs": [drawing.graph(*each, groups) for each in graphs_of(figures)]}


def graphs_of(figures: Row) -> Iterator[tuple[str, list[Drawn]]]:
    """The nodes of each graph that are shown, by the node that holds it; the program's own come first."""
    for holder, nodes in by_graph(list(drawn(figures["program"]["nodes"]))).items():
        yield holder, [node for node in nodes if node.row["op"] != "output"]


def graph_id(figures: Row, holder: str) -> str:
    """What a graph is called: by the program, and by the node that holds it."""
    return "/".join(filter(None, [figures["program"]["name"], holder]))


class _Drawing:
    """What is known of the nodes of a program."""

    def __init__(self, figures: Row) -> None:
        program = figures["program"]
        self._figures, self._sites = figures, EnclosingCalls(program["calls"])
        self._inputs = {row["name"]: row for row in program["inputs"]}
        self._kept = kept_bytes(figures)
        self._nodes = list(drawn(program["nodes"]))
        self._holders = {node.holder for node in self._nodes} - {""}

    def graph(
        self, holder: str, nodes: Sequence[Drawn], groups: Mapping[str, dict[str, str]]
    ) -> dict[str, Any]:
        """One graph, with the groups that its nodes make, and the program's own with those of all."""
        shown = [self._node(node) for node in nodes]
        layers = {layer for node in shown for layer in _layers(node["namespace"])}
        return {
            "id": graph_id(self._figures, holder),
            "nodes": shown,
            "groupNodeAttributes": {
                layer: texts for layer, texts in groups.items() if not holder or layer in layers
            },
        }

    def _node(self, node: Drawn) -> dict[str, Any]:
        row, read = self._inputs.get(node.name), node.reads()
        held = [graph_id(self._figures, name) for name in dict.fromkeys(read) if name in self._holders]
        return {
            "id": node.name,
            "label": short(node.row["target"]) if row is None else row["path"],
            "namespace": self._namespace(node),
            "attrs": list(self._attributes(node)),
            "incomingEdges": [
                {"sourceNodeId": name, "sourceNodeOutputId": "0", "targetNodeInputId": str(at)}
                for at, name in enumerate(read)
            ],
            "outputsMetadata": [
                {"id": "0", "attrs": [_explorer_attribute("made", self._figures["made"][node.name])]}
            ],
            **({"subgraphIds": held} if held else {}),
        }

    def _namespace(self, node: Drawn) -> str:
        if node.name in self._inputs:
            return f"inputs/{self._inputs[node.name]['kind']}"
        if node.row["op"] == "placeholder":  # of a graph that a node runs
            return "inputs"
        chain = self._sites.chain(node)
        site = EnclosingCalls.site(chain[-1]) if chain else ""
        return "/".join([node.row["origin"]["phase"], *_segments(site)])

    def _attributes(self, node: Drawn) -> Iterator[dict[str, Any]]:
        origin = node.row["origin"]
        yield _explorer_attribute("operator", node.row["target"])
        yield _explorer_attribute(
            "origin", f"{origin['quality']}, {' + '.join(origin['calls']) or 'outside any module'}"
        )
        if origin["source"]:
            yield _explorer_attribute("line", origin["source"])
        if forward := forward_of(node, self._nodes):
            yield _explorer_attribute("forward", {"type": "node_ids", "nodeIds": [forward]})
        if node.name in self._figures["costs"]:
            flops, read, written, _ = cost_with_inside(node, self._figures)
            yield _explorer_attribute("FLOPs", _figure_in_words(flops))
            yield _explorer_attribute("bytes moved", _figure_in_words(read + written))
        if node.name in self._figures["idle"]:
            yield _explorer_attribute("counted", "no: another branch is the largest")
        if node.name in self._kept:
            yield _explorer_attribute("kept bytes", _figure_in_words(self._kept[node.name]))


def _layers(namespace: str) -> Iterator[str]:
    segments = namespace.split("/")
    return ("/".join(segments[:count]) for count in range(1, len(segments) + 1))


def _segments(site: str) -> list[str]:
    return [part.replace("/", SLASH) for part in site.split(".")] if site else []


def _explorer_attribute(key: str, value: Any) -> dict[str, Any]:
    return {"key": key, "value": value if isinstance(value, dict) else str(value)}


def _figure_in_words(value: float) -> str:
    return scaled(value).rstrip()


def kept_bytes(figures: Row) -> dict[str, int]:
    """What the backward keeps, by node."""
    return {row["node"]: row["bytes"] for row in figures["memory"]["kept"]}


def _report_groups(figures: Row) -> dict[str, dict[str, str]]:
    """What the report says of a call, for the groups that its nodes make; `""` is the whole graph."""
    found: dict[str, dict[str, str]] = {}
    phases = sorted({node["origin"]["phase"] for node in figures["program"]["nodes"]})
    named = ("path", "index", "depth")
    for row, call in zip(figures["rows"], figures["program"]["calls"], strict=True):
        told = {
            key: _figure_in_words(value) if isinstance(value, (int, float)) else str(value)
            for key, value in row.items()
        }
        texts = {key.replace("_", " "): text for key, text in told.items() if key not in named}
        if call["number"] == 0:
            found[""] = texts
        segments = _segments(EnclosingCalls.site(call))
        if segments:
            found |= {"/".join([phase, *segments]): texts for phase in phases}
    return found
