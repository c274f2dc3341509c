"""The graph for Graphviz quotes whatever names are."""

from __future__ import annotations

import re

from tests.viewer.reading import HOSTILE, program_of

QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


def test_calls_are_clusters_and_reads_are_edges() -> None:
    """Each node once; an edge for each value that it reads."""
    program = program_of()
    text = program.to_text("dot")
    edges = {(node.name, source.name) for node in program.graph.nodes for source in node.all_input_nodes}
    assert {
        (to, source) for source, to in re.findall(r'^  "(\w+)" -> "(\w+)";$', text, re.MULTILINE)
    } == edges
    assert text.count("subgraph cluster_") == len(program.calls)
    assert text.count("[label=") == len(program.graph.nodes)


def test_names_are_quoted() -> None:
    """Outside of quoted texts there are only words of the language."""
    for name in (HOSTILE, 'a"b', "a\\"):
        outside = QUOTED.sub("", program_of(name).to_text("dot"))
        assert set(re.findall(r"\w+", outside)) <= {
            *("digraph", "node", "shape", "box", "fontname", "label", "style", "solid", "dashed", "subgraph"),
            *(f"cluster_{number}" for number in range(9)),
        }
        assert outside.count("{") == outside.count("}")
        assert '"' not in outside
