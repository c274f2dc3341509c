"""Model Explorer and tlparse themselves read what is written for them."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import whence
from tests.libraries.rows import library_called
from tests.viewer.reading import branching, program_of

TLPARSE = Path(sys.executable).parent / "tlparse"
PROGRAMS: Mapping[str, Callable[[], whence.Program]] = {
    "training step": program_of,
    "nested": branching,
    "joint and nested": lambda: branching(backward=True),
}


def explorer(module: str) -> Any:
    """A module of Model Explorer; skips where it is not there."""
    pytest.importorskip("model_explorer", reason="Model Explorer is not installed: make test-libraries")
    return library_called(f"model_explorer.{module}")


@pytest.mark.parametrize("kind", PROGRAMS)
def test_model_explorer_reads_graphs(kind: str) -> None:
    """With its own classes, as its server reads graphs, and with no field that it does not know."""
    builder, dacite = explorer("graph_builder"), library_called("dacite")
    program = PROGRAMS[kind]()
    data = json.loads(program.to_text("model-explorer"))
    collection = dacite.from_dict(builder.GraphCollection, data, config=dacite.Config(strict=True))
    nodes = [node for graph in collection.graphs for node in graph.nodes]
    assert len({node.id for node in nodes}) == sum(node.op != "output" for node in program.nodes())
    assert collection.graphs[0].groupNodeAttributes[""]["type"] == collection.label == program.name
    graphs = {graph.id for graph in collection.graphs}
    assert {each for node in nodes for each in node.subgraphIds} == graphs - {program.name}


def test_model_explorer_reads_node_data() -> None:
    """With its own classes, and it writes what it has read as it was."""
    builder, dacite = explorer("node_data_builder"), library_called("dacite")
    for figure in ("flops", "seconds", {"cond": 1.0, "true_graph_0/sin": 2.0}):
        data = {"graphsData": json.loads(branching().to_text("node-data", values=figure))}
        read = dacite.from_dict(builder.ModelNodeData, data, config=dacite.Config(strict=True))
        again = json.loads(read.to_json_string())
        for name, graph in data["graphsData"].items():
            assert {**again[name], **graph} == again[name]


def test_model_explorer_hands_graphs_to_its_extensions() -> None:
    """On its server's own way from the JSON of a graph."""
    provider, builder = explorer("node_data_provider"), explorer("node_data_builder")

    def run(self: Any, graph: Any, **told: Any) -> Any:
        counted = {node.id: builder.NodeDataResult(len(node.incomingEdges)) for node in graph.nodes}
        return provider.NodeDataProviderResult(builder.GraphNodeData(counted))

    counting = explorer("registered_extension").RegisteredExtension(
        metadata=provider.NodeDataProviderMetadata(id="edges", name="edges", description=""),
        type="node_data_provider",
        ext_class=type("Counting", (), {"run": run}),
    )
    for graph in json.loads(branching().to_text("model-explorer"))["graphs"]:
        asked = {"cmdId": "run", "modelPath": "", "graphId": graph["id"], "configValues": {}, "graph": graph}
        answer = explorer("ndp_runner").NdpRunner().run_ndp(counting, asked)["result"]["results"]
        assert {name: row["value"] for name, row in answer.items()} == {
            node["id"]: len(node["incomingEdges"]) for node in graph["nodes"]
        }


@pytest.mark.skipif(not TLPARSE.exists(), reason="tlparse is not installed: make test-libraries")
@pytest.mark.parametrize("kind", PROGRAMS)
def test_tlparse_reads_the_log(kind: str, tmp_path: Path) -> None:
    """No line that it does not know, and a page for each artefact."""
    (tmp_path / "whence.log").write_text(PROGRAMS[kind]().to_text("tlparse"))
    paths = ["-o", str(tmp_path / "out"), str(tmp_path / "whence.log")]
    command = [str(TLPARSE), "--strict", "--no-browser", *paths]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    pages = {file.name.rpartition("_")[0] for file in (tmp_path / "out").rglob("whence_*")}
    assert pages >= {"whence_program", "whence_operations", "whence_signature", "whence_calls"}
