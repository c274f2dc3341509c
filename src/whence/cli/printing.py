"""What commands print: plain data, and the tree of calls."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from whence.program.plain import with_version
from whence.reports.modules import ModuleReport, count_cells, counted, folded
from whence.reports.report import label

OK, FAILED, USAGE = 0, 1, 2


def print_json(console: Console, data: Any, *, ok: bool = True) -> int:
    """Print plain data; the exit status."""
    console.print(json.dumps(with_version(data), indent=2, allow_nan=False), markup=False)
    return OK if ok else FAILED


def print_page(console: Console, page: object, *, ok: bool = True) -> int:
    """Print what is a page as text; the exit status."""
    console.print(str(page), markup=False)
    return OK if ok else FAILED


def tree_table(report: ModuleReport) -> Table:
    """The calls with how many operations each holds."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module call", overflow="fold")
    table.add_column("class", style="dim")
    counts = counted(report.rows)
    for heading in counts:
        table.add_column(heading, justify="right")
    for shown in folded(report.rows):
        kind = shown.row.type if shown.row.depth else ""
        table.add_row(label(shown), kind, *count_cells(shown.row, counts))
    return table


def signature_line(report: ModuleReport) -> str:
    """How many inputs and outputs there are of each kind."""
    inputs = ", ".join(f"{count} {kind}" for kind, count in report.inputs.items())
    outputs = ", ".join(f"{count} {kind}" for kind, count in report.outputs.items())
    return f"\ninputs: {inputs}\noutputs: {outputs}"
