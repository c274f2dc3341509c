"""One page about a program: what each call holds, costs and keeps for the backward."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import StringIO
from typing import Any

from rich.console import Console, Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from whence.errors import SelectionError, UsageError
from whence.program import FlatProgram
from whence.program.node_records import origin_of
from whence.program.plain import AsJSON
from whence.program.queries.notebook import OpensInNotebook
from whence.program.queries.selecting import select_calls
from whence.reports.cost import RECOMPUTED, Cost, cost_of, data_named
from whence.reports.devices import Device
from whence.reports.memory import Memory, Storages, measured_if, memory_in, recomputing_of
from whence.reports.modules import FoldedRow, ModuleRow, count_cells, counted, folded, module_report
from whence.reports.numbers import scaled
from whence.schema import Phase

_WIDTH = 200
_UNSHOWN = ("parameter bytes", "bytes read", "bytes written")
"""Figures that tables leave out."""
_UNKNOWN = "kept of unknown size"


@dataclass(frozen=True, repr=False)
class Report(OpensInNotebook, AsJSON):
    """The calls of a program in order: operations, parameters, FLOPs by phase, bytes moved and bytes kept.

    Figures include the calls inside. `intensity` is FLOPs for each byte that is read or written; `bytes
    read` and `bytes written`, which are together `bytes moved`, are in data and CSV alone. `kept bytes` are
    what the backward reads of what was made in a call; `kept of unknown size` counts kept values that are
    not in them, workspaces of kernels that are not measured, where there are any. `recomputing saves` are
    the bytes kept less if that call alone were in a checkpoint (without reentrance), below zero where it
    keeps more than it saves: its arguments are kept then, and what only its own derivatives read is not.
    `recomputing FLOPs` are what it computes again: its forward up to the last value that is saved in it,
    beside what checkpoints compute again that are there.
    `ok` says that every operator's FLOPs are known.
    """

    program: str
    rows: tuple[ModuleRow, ...]
    cost: Cost
    memory: Memory

    @property
    def ok(self) -> bool:
        """Whether no FLOPs are missing."""
        return not self.cost.gaps

    def to_dict(self) -> dict[str, Any]:
        """Plain data: rows with their figures, the cost in all, and the memory."""
        rows = [plain_row(row) for row in self.rows]
        cost = {**self.cost.said(), "device": self.cost.device}
        return {"program": self.program, "ok": self.ok, "rows": rows, **cost, "memory": self.memory.to_dict()}

    def to_csv(self) -> str:
        """A line for each call, unfolded, in plain numbers; `call` names it as the tables do."""
        rows = [{"call": _name(row), **plain_row(row)} for row in self.rows]
        text = StringIO()
        writer = csv.DictWriter(text, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_markdown(self) -> str:
        """A table with equal neighbours folded."""
        heads, lines = _cells(self.rows)
        rule = ["---", "---", *("---:" for _ in heads[2:])]
        rows = (map(_in_markdown, line) for line in lines)
        return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *rows))

    def __rich__(self) -> Group:
        return Group(self.table(), Text(f"\n{self.memory}\n{self.cost.notes()}".rstrip()))

    def table(self) -> Table:
        """The calls, equal neighbours folded."""
        heads, lines = _cells(self.rows)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for at, head in enumerate(heads):
            justify: JustifyMethod = "left" if at < 2 else "right"
            words = head if at == 0 else head.replace(" ", "\n")
            table.add_column(words, justify=justify, vertical="bottom", no_wrap=True)
        for line in lines:
            table.add_row(*map(Text, line))
        return table

    def __repr__(self) -> str:
        return f"<Report on {self.program}: {len(self.rows):,} calls>"

    def __str__(self) -> str:
        console = Console(width=_WIDTH, file=StringIO(), color_system=None)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())


def _in_markdown(text: str) -> str:
    """A name in a cell: of what it holds, nothing is markup."""
    return escape(text, quote=False).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def report_of(
    program: FlatProgram,
    device: str | Device | None = None,
    sizes: Mapping[str, int] | None = None,
    *,
    measure: bool = False,
) -> Report:
    """Rows are in the order of calls. Raises `UsageError` for a device that there is not, and for sizes that
    only data decide."""
    cost = cost_of(program, device, sizes)
    storages = Storages(program, sizes or {}, measured=measured_if(measure))
    with data_named(program, sizes):
        memory, again = memory_in(storages), recomputing_of(storages, cost)
    kept, unknown = _kept_by_call(program, memory)
    rows = []
    for number, row in enumerate(module_report(program).rows):
        found = cost.rows[number]
        figures: dict[str, float] = {"parameter bytes": found.parameter_bytes}
        for phase in (*map(str, Phase), RECOMPUTED):
            if phase in cost.total.flops:
                figures[f"{phase} FLOPs"] = found.flops.get(phase, 0)
        figures |= {"bytes read": found.read, "bytes written": found.written}
        figures |= {"bytes moved": found.read + found.written, "intensity": round(found.intensity, 3)}
        figures["kept bytes"] = kept[number]
        figures |= {_UNKNOWN: unknown[number]} if unknown else {}
        figures |= {f"recomputing {name}": figure for name, figure in again.get(number, {}).items()}
        figures |= {} if found.seconds is None else {"microseconds": round(found.seconds * 1e6, 3)}
        rows.append(replace(row, parameters=found.parameters, figures=tuple(figures.items())))
    return Report(program.name, tuple(rows), cost, memory)


def chosen(
    program: FlatProgram, report: Report, depth: int | None, sort: str | None, where: str | None
) -> Report:
    """The report with rows that are no deeper than `depth` and fit `where`, the largest by `sort` first.

    Raises `UsageError` for a figure that there is not, and `SelectionError` where no row fits.
    """
    rows = [row for row in report.rows if depth is None or row.depth <= depth]
    if where is not None:
        fitting = {(str(call.site.path), call.site.index) for call in select_calls(program, where)}
        rows = [replace(row, depth=1) for row in rows if row.depth and (row.path, row.index) in fitting]
    if not rows:
        raise SelectionError(f"no call fits {where or '*'!r} down to depth {depth}", remedy="go deeper")
    return replace(report, rows=tuple(rows if sort is None else _sorted_rows(rows, sort)))


def _sorted_rows(rows: list[ModuleRow], sort: str) -> list[ModuleRow]:
    names = [name for name, _ in rows[0].figures] if rows else [sort]
    if sort not in (*names, "parameters"):
        raise UsageError(f"there is no figure {sort!r}", remedy=f"sort by parameters, {', '.join(names)}")
    flat = [replace(row, depth=min(row.depth, 1)) for row in rows]
    return sorted(flat, key=lambda row: -dict(row.figures).get(sort, row.parameters))


def _kept_by_call(program: FlatProgram, memory: Memory) -> tuple[Counter[int], Counter[int]]:
    """The bytes that are kept of each call, by number, and how many values of which nobody knows the size."""
    found, unknown = Counter[int](), Counter[int]()
    for row in memory.kept:
        for number in program.calls.around(origin_of(program.node(row.node)).place):
            found[number] += row.bytes
            unknown[number] += not row.known
    return found, +unknown


def plain_row(row: ModuleRow) -> dict[str, Any]:
    """A row with its figures beside its counts."""
    held = {"path": row.path, "index": row.index, "type": row.type, "depth": row.depth}
    counts = {"forward": row.forward, "backward": row.backward, "optimizer": row.optimizer}
    named = {**held, **counts, "parameters": row.parameters}
    return {**named, **{name.replace(" ", "_").lower(): value for name, value in row.figures}}


def _cells(rows: Sequence[ModuleRow]) -> tuple[list[str], list[list[str]]]:
    names = [name for name, _ in rows[0].figures if name not in _UNSHOWN]
    counts = counted(rows)
    heads = ["module call", "class", *counts, *names]
    lines = []
    for shown in folded(tuple(rows)):
        row, named = shown.row, dict(shown.row.figures)
        figures = [scaled(named[name]) if named[name] or not row.depth else "" for name in names]
        lines.append([label(shown), row.type if row.depth else "", *count_cells(row, counts), *figures])
    return heads, lines


def label(shown: FoldedRow) -> str:
    """A call as a row of a tree names it; equal neighbours are one row."""
    row = shown.row
    others = "" if shown.last == row.path else f" … {shown.last.rpartition('.')[2]}"
    several = f"{others}  × {shown.times}" if shown.times > 1 else ""
    return "  " * (row.depth - 1) + _name(row) + several


def _name(row: ModuleRow) -> str:
    """The program itself is not the call of the model in it."""
    name = row.path or ("(root)" if row.depth else "(program)")
    return f"{name}@{row.index}" if row.index else name
