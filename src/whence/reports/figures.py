"""What a page about a program draws, as plain data: its graph, figures of calls, costs of nodes, memory."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from whence._torch.graphs import nested_graph
from whence._torch.record.annotations import said_of
from whence.program import FlatProgram
from whence.program.queries.marks import marked
from whence.program.signature import Input, describe
from whence.reports.cost import NodeCost, checked_sizes, data_named
from whence.reports.devices import Device
from whence.reports.flops import held_graphs
from whence.reports.memory import Storages
from whence.reports.plain import plain
from whence.reports.report import plain_row, report_of
from whence.schema import Aspect, InputKind

INSIDE = "/"
"""Between the node that holds a graph and the nodes of that graph: `true_graph_0/sin`."""


def figures_of(
    program: FlatProgram,
    device: str | Device | None = None,
    sizes: Mapping[str, int] | None = None,
    values: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """`program` is `to_dict`, `rows` are those of `report`; `costs`, `made`, `bases`, `values` are by node.

    A node of a nested graph is called by the nodes that hold it and its own name (`INSIDE`): names are unique
    only in one graph. `inside` says for a node what the graphs take that it runs, `made` what a node makes,
    in the words of `diff`. `idle` are the nodes of branches that do not count, `bases` those in whose memory
    the value of another lies. `chosen` is what `select` reads besides origins. Raises `SelectionError` for
    values of nodes that there are not, and what `report` raises.
    """
    nodes = dict(_nodes_by_name(program.graph_module))
    for name in [name for name in values or () if name not in nodes]:
        program.node(name)
    report = report_of(program, device, sizes)
    operations = (name for name, node in nodes.items() if node.op == "call_function")
    costs = dict(zip(operations, report.cost.nodes, strict=True))
    return {
        "program": plain(program),
        "rows": [plain_row(row) for row in report.rows],
        "device": report.cost.device,
        "costs": {name: _figures(cost) for name, cost in costs.items()},
        "inside": _costs_inside(nodes, costs),
        "idle": [name for name, cost in costs.items() if not cost.taken],
        "notes": report.cost.notes(),
        "memory": report.memory.to_dict(),
        "made": {name: describe(node.meta.get("val")) for name, node in nodes.items() if node.op != "output"},
        "bases": _bases(program, sizes),
        "values": None if values is None else {name: float(value) for name, value in values.items()},
        "chosen": _chosen(program),
    }


def _figures(cost: NodeCost) -> list[float]:
    return [cost.flops, cost.read, cost.written, cost.seconds]


def _costs_inside(nodes: Mapping[str, fx.Node], costs: Mapping[str, NodeCost]) -> dict[str, list[float]]:
    """What the graphs take that a node runs."""
    found = {}
    for name, node in nodes.items():
        around = name.removesuffix(node.name)
        if starts := tuple(f"{around}{source.name}{INSIDE}" for source, _ in held_graphs(node)):
            rows = [_figures(cost) for each, cost in costs.items() if cost.taken and each.startswith(starts)]
            found[name] = [sum(column) for column in zip(*rows, strict=True)]
    return found


def _nodes_by_name(module: fx.GraphModule, around: str = "") -> Iterator[tuple[str, fx.Node]]:
    for node in module.graph.nodes:
        yield f"{around}{node.name}", node
        if (inner := nested_graph(node)) is not None:
            yield from _nodes_by_name(inner, f"{around}{node.name}{INSIDE}")


def _chosen(program: FlatProgram) -> dict[str, Any]:
    """Which nodes are marked, and what is said of nodes, by position; which inputs modules hold."""
    place = {node: at for at, node in enumerate(program.nodes())}
    said: dict[str, dict[str, list[int]]] = {}
    for node, at in place.items():
        for key, text in said_of(node).items():
            said.setdefault(str(key), {}).setdefault(str(text), []).append(at)
    return {
        "marks": {mark.value: sorted(place[node] for node in marked(program, mark)) for mark in Aspect},
        "kinds": [kind.value for kind in InputKind],
        "said": said,
        "held": {
            row.name: _owner_of(row) for row in (*program.signature.attributes, *program.signature.inputs)
        },
    }


def _owner_of(row: Input) -> dict[str, Any]:
    """Whether modules hold an input, under its path and its aliases, and the class of the first of them."""
    return {"type": row.module_type, "is_held": row.module is not None}


def _bases(program: FlatProgram, sizes: Mapping[str, int] | None) -> dict[str, str]:
    """Of each view: the first node that made the memory in which it lies."""
    with data_named(program, sizes):
        bases: Mapping[fx.Node, tuple[fx.Node, ...]] = Storages(program, checked_sizes(program, sizes)).bases
    return {node.name: row[0].name for node, row in bases.items() if row and row[0] is not node}
