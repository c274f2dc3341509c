"""The graph as DOT, for Graphviz: calls and nested graphs are clusters, and the backward is dashed."""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from whence.reports.formats.nodes import Drawn, EnclosingCalls, Row, drawn, short

_STYLES = {"forward": "solid", "backward": "dashed", "optimizer": "dotted"}


def dot(figures: Row) -> str:
    """One digraph; whatever names are, they are quoted texts."""
    program = figures["program"]
    nodes = list(drawn(program["nodes"]))
    lines = [f"digraph {_quoted(program['name'])} {{", '  node [shape=box, fontname="Helvetica"];']
    clusters = _cluster(_cluster_tree(nodes, program["calls"]), figures["made"], "  ", count(1))
    return "\n".join([*lines, *clusters, *_edges(nodes), "}", ""])


def _cluster_tree(nodes: list[Drawn], calls: list[Row]) -> dict[str, Any]:
    """The clusters inside of each other; that of a nested graph lies where the node lies that holds it."""
    sites, around = EnclosingCalls(calls), dict[str, tuple[str, ...]]()
    root: dict[str, Any] = {"nodes": [], "inside": {}}
    for node in nodes:
        holder = (*around[node.holder], node.holder) if node.holder else ()
        labels = [EnclosingCalls.label(call) for call in sites.chain(node)]
        around[node.name] = (*holder, *(label for label in labels if label not in holder))
        held = root
        for label in around[node.name]:
            held = held["inside"].setdefault(label, {"nodes": [], "inside": {}})
        held["nodes"].append(node)
    return root


def _edges(nodes: list[Drawn]) -> Iterator[str]:
    for node in nodes:
        for name in dict.fromkeys(node.reads()):
            yield f"  {_quoted(name)} -> {_quoted(node.name)};"
        if node.row["op"] == "output" and node.holder:
            yield f"  {_quoted(node.name)} -> {_quoted(node.holder)} [style=dotted];"


def _cluster(held: Row, made: Mapping[str, str], indent: str, numbers: Iterator[int]) -> Iterator[str]:
    for node in held["nodes"]:
        said = dict.fromkeys([node.row["name"], short(node.row["target"]), made.get(node.name, "")])
        label = "\n".join(filter(None, said))
        style = _STYLES[node.row["origin"]["phase"]]
        yield f"{indent}{_quoted(node.name)} [label={_quoted(label)}, style={style}];"
    for name, inner in held["inside"].items():
        yield f"{indent}subgraph cluster_{next(numbers)} {{"
        yield f"{indent}  label={_quoted(name)};"
        yield from _cluster(inner, made, f"{indent}  ", numbers)
        yield f"{indent}}}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
