"""What a page about a program draws, as plain data: its graph, figures of calls, costs of nodes, memory."""

from collections.abc import Mapping
from typing import Any

from torch import fx

from whence.program import Program
from whence.program.signature import describe
from whence.reports.cost import checked_sizes, data_named
from whence.reports.devices import Device
from whence.reports.memory import Storages
from whence.reports.plain import plain
from whence.reports.report import plain_row, report_of


def figures_of(
    program: Program,
    device: str | Device | None = None,
    sizes: Mapping[str, int] | None = None,
    values: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """`program` is `to_dict`, `rows` are those of `report`; `costs`, `made`, `bases`, `values` are by node.

    `made` says what a node makes, in the words of `diff`. `bases` are the nodes in whose memory the value of
    another lies. Raises `SelectionError` for values of nodes that there are not, and what `report` raises.
    """
    for name in values or ():
        program.node(name)
    report = report_of(program, device=device, sizes=sizes)
    return {
        "program": plain(program),
        "rows": [plain_row(row) for row in report.rows],
        "device": report.cost.device,
        "costs": {
            cost.name: [cost.flops, cost.read, cost.written, cost.seconds] for cost in report.cost.nodes
        },
        "notes": report.cost.notes(),
        "memory": report.memory.to_dict(),
        "made": {
            node.name: describe(node.meta.get("val")) for node in program.nodes() if node.op != "output"
        },
        "bases": _bases(program, sizes),
        "values": None if values is None else {name: float(value) for name, value in values.items()},
    }


def _bases(program: Program, sizes: Mapping[str, int] | None) -> dict[str, str]:
    """Of each view: the first node that made the memory in which it lies."""
    with data_named():
        bases: Mapping[fx.Node, tuple[fx.Node, ...]] = Storages(program, checked_sizes(program, sizes)).bases
    return {node.name: row[0].name for node, row in bases.items() if row and row[0] is not node}
