"""The graph of NetworkX has every node and every value that is read, and can be written."""

from __future__ import annotations

from io import BytesIO

import networkx
import torch

import whence
from tests.viewer.reading import program_of


def test_nodes_and_edges() -> None:
    """By name, each with its position among what the node reads; forward before backward."""
    program = program_of()
    graph = program.to_networkx()
    assert list(graph.nodes) == [node.name for node in program.graph.nodes]
    assert networkx.is_directed_acyclic_graph(graph)
    for node in program.graph.nodes:
        assert set(graph.predecessors(node.name)) == {source.name for source in node.all_input_nodes}
    for name, known in graph.nodes(data=True):
        place = program.where(name).place
        assert known["call"] == ("" if place is None else str(place))


def test_a_value_that_is_read_twice() -> None:
    """Two edges, with their positions."""
    graph = whence.capture(lambda x: x * x, (torch.ones(2),)).to_networkx()
    (rows,) = ([data["position"] for *_, data in graph.in_edges(name, data=True)] for name in ("mul",))
    assert rows == [0, 1]


def test_it_can_be_written() -> None:
    """Attributes are numbers and texts, which files of graphs hold."""
    graph = program_of().to_networkx()
    held = BytesIO()
    networkx.write_graphml(graph, held)
    held.seek(0)
    again = networkx.read_graphml(held)
    assert set(again.nodes) == set(graph.nodes) and again.number_of_edges() == graph.number_of_edges()


def test_sizes_that_data_decide_are_given() -> None:
    """As in a report."""
    program = whence.capture(lambda x: x[x > 0].sin(), (torch.tensor([1.0, -1.0, 2.0]),))
    assert "sin" in program.to_networkx(sizes={"size_of_index": 2}).nodes
    assert "sin" in program.to_text("model-explorer", sizes={"size_of_index": 2})
