"""The graph as DOT, for Graphviz: calls are clusters, and the backward is dashed."""

from collections.abc import Iterator, Mapping
from typing import Any

from whence.reports.formats.nodes import CallsAround, Row, reads, short

_STYLES = {"forward": "solid", "backward": "dashed", "optimizer": "dotted"}


def dot(figures: Row) -> str:
    """One digraph; whatever names are, they are quoted texts."""
    program = figures["program"]
    sites = CallsAround(program["calls"])
    root: dict[str, Any] = {"nodes": [], "inside": {}}
    for node in program["nodes"]:
        held = root
        for call in sites.chain(node):
            inside = {"label": CallsAround.label(call), "nodes": [], "inside": {}}
            held = held["inside"].setdefault(call["number"], inside)
        held["nodes"].append(node)
    edges = [
        f"  {_quoted(name)} -> {_quoted(node['name'])};"
        for node in program["nodes"]
        for name in dict.fromkeys(reads(node))
    ]
    lines = [f"digraph {_quoted(program['name'])} {{", '  node [shape=box, fontname="Helvetica"];']
    return "\n".join([*lines, *_cluster(root, figures["made"], "  "), *edges, "}", ""])


def _cluster(held: Row, made: Mapping[str, str], indent: str) -> Iterator[str]:
    for node in held["nodes"]:
        said = dict.fromkeys([node["name"], short(node["target"]), made.get(node["name"], "")])
        label = "\n".join(filter(None, said))
        style = _STYLES[node["origin"]["phase"]]
        yield f"{indent}{_quoted(node['name'])} [label={_quoted(label)}, style={style}];"
    for number, inner in held["inside"].items():
        yield f"{indent}subgraph cluster_{number} {{"
        yield f"{indent}  label={_quoted(inner['label'])};"
        yield from _cluster(inner, made, f"{indent}  ")
        yield f"{indent}}}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
