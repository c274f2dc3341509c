"""The graph for Graphviz quotes whatever names are."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

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


@pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz here")
def test_graphviz_reads_it() -> None:
    """Its parser finds every node, edge and cluster, with the names as they are, and lays them out."""
    for name in ("first", HOSTILE, 'a"b', "a\\", "{|}<x>", "ü\\n"):
        program = program_of(name)
        edges = {(node, source) for node in program.graph.nodes for source in node.all_input_nodes}
        plain = _by_graphviz(program.to_text("dot"), "plain").splitlines()
        assert {line.split()[1] for line in plain if line.startswith("node")} == {
            node.name for node in program.graph.nodes
        }
        assert sum(line.startswith("edge") for line in plain) == len(edges)
        picture = _by_graphviz(program.to_text("dot"), "svg")
        assert picture.count('class="cluster"') == len(program.calls)
        assert "<img" not in picture


def _by_graphviz(text: str, form: str) -> str:
    run = subprocess.run(["dot", f"-T{form}"], input=text, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return run.stdout
