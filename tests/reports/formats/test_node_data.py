"""Numbers of nodes for Model Explorer: figures of ours, and the caller's own."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import whence
from tests.viewer.reading import branching, program_of
from whence.errors import SelectionError, UsageError


def numbers(data: dict[str, Any]) -> dict[str, float]:
    return {name: row["value"] for graph in data.values() for name, row in graph["results"].items()}


def test_figures_are_those_of_cost_and_memory() -> None:
    """Each by its name, FLOPs where nothing is said; seconds are those of the device."""
    program = program_of()
    cost, memory = program.cost("a100"), program.memory()
    expected = {
        "flops": {row.name: row.flops for row in cost.nodes},
        "bytes": {row.name: row.read + row.written for row in cost.nodes},
        "seconds": {row.name: row.seconds for row in cost.nodes},
        "kept": {row.node: row.bytes for row in memory.kept},
    }
    for figure, by_node in expected.items():
        data = json.loads(program.to_text("node-data", "a100", values=figure))
        assert list(data) == [program.name] and data[program.name]["name"] == figure
        assert numbers(data) == by_node
    assert numbers(json.loads(program.to_text("node-data"))) == expected["flops"]


def test_nodes_of_nested_graphs_have_theirs() -> None:
    """In the graphs that the other form has, by the same names; what runs a graph has all of it."""
    data = json.loads(branching().to_text("node-data"))
    drawn = json.loads(branching().to_text("model-explorer"))["graphs"]
    assert list(data) == [graph["id"] for graph in drawn]
    for graph in drawn:
        assert data[graph["id"]]["results"].keys() <= {node["id"] for node in graph["nodes"]}
    flops = numbers(data)
    assert flops["true_graph_0/linear"] == flops["cond"] > 0


def test_a_node_of_a_nested_graph_has_what_it_runs() -> None:
    """A branch in a branch takes what its own graphs take."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.mean() > 1, lambda x: x @ x, lambda x: x.cos(), (x,))

    program = whence.capture(
        lambda x: torch.cond(x.sum() > 0, inner, lambda x: x.sin(), (x,)), (torch.ones(4, 4),)
    )
    flops = numbers(json.loads(program.to_text("node-data")))
    assert flops["cond"] == flops["true_graph_0/cond"] == program.cost().total.total_flops == 128


def test_numbers_of_the_callers_own() -> None:
    """By name, also in nested graphs; what no number is stays without one."""
    own = {"cond": 2.0, "true_graph_0/sin": 3, "scan": math.nan}
    data = json.loads(branching().to_text("node-data", values=own))
    assert numbers(data) == {"cond": 2.0, "true_graph_0/sin": 3.0}
    assert branching().view(values=own).exists()


def test_other_names_are_refused() -> None:
    """Of nodes, of figures, and values for a form that has no place for them."""
    with pytest.raises(SelectionError, match="no node is called 'true_graph_0/tan'"):
        branching().to_text("node-data", values={"true_graph_0/tan": 1.0})
    with pytest.raises(UsageError, match="the figures are flops, bytes, kept, seconds"):
        branching().to_text("node-data", values="joules")
    with pytest.raises(UsageError, match="node-data is the form for them"):
        branching().to_text("dot", values="flops")
