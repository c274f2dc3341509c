"""The graph that Model Explorer reads has its fields, and says where nodes come from."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import whence
from tests.viewer.reading import branching, program_of
from whence.errors import UsageError

NODE = {
    "id": str,
    "label": str,
    "namespace": str,
    "attrs": list,
    "incomingEdges": list,
    "outputsMetadata": list,
}
EDGE = {"sourceNodeId": str, "sourceNodeOutputId": str, "targetNodeInputId": str}
ATTRIBUTE = {"key": str, "value": (str, dict)}
"""The fields of `model_explorer.graph_builder` that we write, with their types."""


def has_fields(data: dict[str, Any], fields: dict[str, Any]) -> bool:
    return data.keys() == fields.keys() and all(isinstance(data[key], kind) for key, kind in fields.items())


def graph_of(program: whence.Program) -> dict[str, Any]:
    data = json.loads(program.to_text("model-explorer"))
    (graph,) = data["graphs"]
    found: dict[str, Any] = graph
    return found


def test_it_has_the_fields_of_the_format() -> None:
    """Nodes, edges and attributes; each edge leads from a node that is there."""
    graph = graph_of(program_of())
    known = {node["id"] for node in graph["nodes"]}
    assert len(known) == len(graph["nodes"])
    for node in graph["nodes"]:
        assert has_fields(node, NODE)
        assert all(has_fields(edge, EDGE) and edge["sourceNodeId"] in known for edge in node["incomingEdges"])
        held = [*node["attrs"], *(each for output in node["outputsMetadata"] for each in output["attrs"])]
        assert all(has_fields(each, ATTRIBUTE) for each in held)


def test_layers_are_phases_then_modules() -> None:
    """Groups have what the report says, and backward nodes lead to forward ones."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    graph = graph_of(whence.capture(model, (torch.randn(3, 4),), backward=lambda y: y.sum()))
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert nodes["relu"]["namespace"] == "forward/0/1"
    assert graph["groupNodeAttributes"]["backward/0/0"]["type"] == "Linear"
    assert graph["groupNodeAttributes"][""]["parameters"] == "25"
    (backward,) = (node for node in graph["nodes"] if node["label"] == "threshold_backward")
    values = {each["key"]: each["value"] for each in backward["attrs"]}
    assert values["forward"] == {"type": "node_ids", "nodeIds": ["relu"]}


def test_graphs_that_nodes_run_are_subgraphs() -> None:
    """Of the nodes that run them, with the groups of their own nodes."""
    graphs = {graph["id"]: graph for graph in json.loads(branching().to_text("model-explorer"))["graphs"]}
    nodes = {node["id"]: node for graph in graphs.values() for node in graph["nodes"]}
    assert nodes["cond"]["subgraphIds"] == ["Branching/true_graph_0", "Branching/false_graph_0"]
    assert "subgraphIds" not in nodes["true_graph_0"]
    inner = graphs["Branching/true_graph_0"]
    assert {node["namespace"] for node in inner["nodes"]} == {"inputs", "forward/inner"}
    assert set(inner["groupNodeAttributes"]) == {"forward/inner"}
    for graph in graphs.values():
        known = {node["id"] for node in graph["nodes"]}
        read = {edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]}
        assert read <= known


def test_slashes_in_names_make_no_layers() -> None:
    """The format splits there."""
    graph = graph_of(program_of("a/b"))
    assert {node["namespace"].count("/") for node in graph["nodes"]} == {0, 1}


def test_another_form_is_refused() -> None:
    """The answer lists those that there are."""
    with pytest.raises(UsageError, match="the forms are model-explorer, node-data, trace, dot, tlparse"):
        program_of().to_text("svg")
