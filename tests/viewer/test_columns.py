"""The columns of a page say what the program says, node by node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import whence
from tests.viewer.reading import figures, program_of, summed
from whence.reports.figures import figures_of
from whence.viewer.columns import REFERENCE, columns


def absolute(distances: list[int]) -> list[int | None]:
    return [at - distance if distance else None for at, distance in enumerate(distances)]


def test_nodes_have_their_origins() -> None:
    """Names, operators, calls, phases, and the forward nodes of backward nodes."""
    program, found = program_of(), columns(figures())
    nodes, texts = found["nodes"], found["texts"]
    assert nodes["name"] == [node.name for node in program.graph.nodes]
    sites = [str(call.site) for call in program.calls.rows]
    for at, (node, place) in enumerate(zip(program.graph.nodes, summed(nodes["place"]), strict=True)):
        origin = program.where(node)
        assert sites[place] == ("" if origin.place is None else str(origin.place))
        assert texts[nodes["target"][at]].startswith(str(getattr(node.target, "overloadpacket", "")))
        forward = absolute(nodes["forward"])[at]
        assert (None if forward is None else nodes["name"][forward]) == origin.forward


def test_arguments_are_text_with_references() -> None:
    """Where the text of an expression has a reference, the node that is read stands for it."""
    program, found = program_of(), columns(figures())
    nodes, texts, at = found["nodes"], found["texts"], 0
    for place, node in enumerate(program.graph.nodes):
        count = nodes["count"][place]
        read = [nodes["name"][place - distance] for distance in nodes["reads"][at : at + count]]
        assert texts[nodes["expression"][place]].count(REFERENCE) == count
        assert set(read) == {source.name for source in node.all_input_nodes}
        at += count


def test_equal_layers_are_equal_numbers() -> None:
    """Their distances are the same, so that compression stores them once."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)))
    program = whence.capture(model, (torch.randn(3, 4),))
    found = columns(figures_of(program))
    first, second = (program.select(f"{layer} :: forward") for layer in (1, 2))
    position = {name: at for at, name in enumerate(found["nodes"]["name"])}
    for one, other in zip(first, second, strict=True):
        for column in ("count", "phase", "expression", "source"):
            assert found["nodes"][column][position[one.name]] == found["nodes"][column][position[other.name]]


def test_memory_and_what_is_kept() -> None:
    """The timeline, and for each kept value its node and its reader."""
    memory, found = program_of().memory(), columns(figures())
    names, drawn = found["nodes"]["name"], found["memory"]
    assert [
        (names[at], alive) for at, alive in zip(summed(drawn["nodes"]), summed(drawn["alive"]), strict=True)
    ] == list(memory.timeline)
    kept = zip(
        summed(drawn["kept"]["node"]), summed(drawn["kept"]["consumer"]), drawn["kept"]["bytes"], strict=True
    )
    assert {(names[node], names[consumer], size) for node, consumer, size in kept} == {
        (row.node, row.consumer, row.bytes) for row in memory.kept
    }


def test_figures_are_in_the_order_of_calls() -> None:
    """Those of the report."""
    program, found = program_of(), columns(figures())
    rows = program.report().to_dict()["rows"]
    assert [found["texts"][at] for at in found["calls"]["path"]] == [row["path"] for row in rows]
    for name, column in found["calls"]["figures"].items():
        assert column == [row[name] for row in rows]


class _Branch(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def test_graphs_of_branches_stand_behind_their_operation() -> None:
    """Their nodes name the operation that holds them, and read what is in their own graph."""
    found = columns(figures_of(whence.capture(_Branch(), (torch.randn(3),))))
    nodes = found["nodes"]
    owners = {nodes["name"][at - distance] for at, distance in enumerate(nodes["within"]) if distance}
    assert owners
    inside = [at for at, distance in enumerate(nodes["within"]) if distance]
    assert {found["texts"][nodes["target"][at]] for at in inside} >= {"aten.sin.default", "aten.cos.default"}


def test_nodes_of_nested_graphs_have_figures_of_their_own() -> None:
    """Whatever else is called as they are: names are unique only in one graph."""

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.cond(
                x.sum() > 0, lambda x: x.sin(), lambda x: x.repeat(2, 1).sin().sum(0), (x,)
            ).sin()

    program = whence.capture(Twice(), (torch.randn(3),))
    found = columns(figures_of(program))
    called = [at for at, name in enumerate(found["nodes"]["name"]) if name == "sin"]
    assert [found["costs"]["written"][at] for at in called] == [12, 24, 12]
    assert [found["texts"][found["made"][at]] for at in called] == ["f32[3]", "f32[2, 3]", "f32[3]"]


def test_words_of_select_are_data() -> None:
    """Which nodes are of the loss or saved, and what regions say, by position among all nodes."""

    def loss(x: Tensor) -> Tensor:
        with whence.region("gate"):
            return x.sin().sum()

    program = whence.capture(nn.Linear(4, 2), (torch.randn(3, 4),), backward=loss)
    chosen, nodes = columns(figures_of(program))["chosen"], list(program.nodes())
    for mark, places in chosen["marks"].items():
        marked = [nodes[at] for at in summed(places)]
        assert marked == (program.select(f":: {mark}") if marked else [])
    ((_, places),) = chosen["said"]["region"]
    assert [nodes[at] for at in summed(places)] == program.select("region=gate")
    assert chosen["kinds"][:3] == ["user", "parameter", "buffer"]
