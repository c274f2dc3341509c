"""Every node of every graph is in every form, below the node that runs its graph."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import networkx
import pytest
import torch
from torch._higher_order_ops import while_loop

import whence
from tests.viewer.reading import branching
from whence.reports.figures import figures_of


def named(nodes: list[dict[str, Any]], around: str = "") -> Iterator[tuple[str, str]]:
    """Each node of plain data by the nodes that hold its graph and its own name, and what it is."""
    for node in nodes:
        yield f"{around}{node['name']}", node["op"]
        yield from named(node.get("graph", []), f"{around}{node['name']}/")


def looping() -> whence.Program:
    """A loop whose body has a branch."""

    def halved(x: torch.Tensor) -> Any:
        return torch.cond(x.mean() > 1, lambda x: x / 2, lambda x: x.sqrt(), (x,))

    def loop(x: torch.Tensor) -> Any:
        return while_loop(lambda x: x.sum() > 1, lambda x: (halved(x) - 1,), (x,))

    return whence.capture(loop, (torch.ones(3),))


PROGRAMS: Mapping[str, Callable[[], whence.Program]] = {
    "forward": branching,
    "joint": lambda: branching(backward=True),
    "loop": looping,
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_node_is_in_every_form(kind: str) -> None:
    """As `nodes()` lists them; a trace leaves out the branch that does not count."""
    program = PROGRAMS[kind]()
    names = dict(named(program.to_dict()["nodes"]))
    assert len(names) == len([*program.nodes()]) > len(program.graph.nodes)
    graphs = json.loads(program.to_text("model-explorer"))["graphs"]
    shown = [node["id"] for graph in graphs for node in graph["nodes"]]
    assert sorted(shown) == sorted(name for name, op in names.items() if op != "output")
    assert list(program.to_networkx()) == list(names)
    drawn = re.findall(r'^ +"([^"]+)" \[label', program.to_text("dot"), re.MULTILINE)
    assert sorted(drawn) == sorted(names)
    operations = [name for name, op in names.items() if op == "call_function"]
    log = program.to_text("tlparse")
    assert all(f"\t  {name}: " in log for name in operations)
    events = json.loads(program.to_text("trace"))["traceEvents"]
    timed = [event["args"]["node"] for event in events if event["ph"] in "BX" and "args" in event]
    assert sorted(timed) == sorted(set(operations) - set(figures_of(program)["idle"]))


def test_what_a_graph_returns_leads_to_what_runs_it() -> None:
    """In NetworkX by edges of a kind of their own, in DOT by dotted ones, from within clusters."""
    graph = branching().to_networkx()
    assert networkx.is_directed_acyclic_graph(graph)
    (edge,) = graph.get_edge_data("true_graph_0/output", "true_graph_0").values()
    assert edge["kind"] == "graph" and graph.nodes["true_graph_0/sin"]["graph"] == "true_graph_0"
    assert networkx.has_path(graph, "true_graph_0/sin", "cond")
    text = branching().to_text("dot")
    assert '"true_graph_0/output" -> "true_graph_0" [style=dotted];' in text
    (inside,) = re.findall(r'label="inner: Inner";(.*?)\n    }', text, re.DOTALL)
    assert 'label="true_graph_0";' in inside and '"true_graph_0/sin" [' in inside


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_plain_data_is_a_form(program: Callable[[], whence.Program]) -> None:
    """What `whence graph` writes as JSON is what `to_text` gives, and `to_dict` says."""
    found = program()
    assert json.loads(found.to_text("json")) == found.to_dict()


@pytest.mark.parametrize("kind", PROGRAMS)
def test_figures_add_up(kind: str) -> None:
    """To those of the costs: all nodes of NetworkX, and those of the outer graph in node data."""
    program, rows = PROGRAMS[kind](), PROGRAMS[kind]().to_networkx().nodes(data=True)
    total = program.cost().total
    assert sum(row["flops"] for _, row in rows) == total.total_flops
    assert sum(row["bytes"] for _, row in rows) == total.read + total.written
    idle = set(figures_of(program)["idle"])
    assert idle == {name for name, row in rows if row["idle"]} and idle
    for figure, expected in (("flops", total.total_flops), ("bytes", total.read + total.written)):
        outer = next(iter(json.loads(program.to_text("node-data", values=figure)).values()))
        assert sum(row["value"] for row in outer["results"].values()) == expected
    graphs = json.loads(program.to_text("model-explorer"))["graphs"]
    told = [node for graph in graphs for node in graph["nodes"]]
    uncounted = {node["id"] for node in told if any(each["key"] == "counted" for each in node["attrs"])}
    assert uncounted == idle
