"""What each module call contributes: operations by phase, and parameters."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from whence.program import FlatProgram
from whence.program.node_records import origin_of
from whence.program.plain import AsJSON
from whence.schema import InputKind, Phase

FOLD_FROM = 3


@dataclass(frozen=True)
class ModuleRow:
    """One module call. Counts include the calls inside it; `parameters` counts elements, shared ones once.

    `optimizer` operations update its parameters. `figures` are further columns, as a report has them.
    """

    path: str
    index: int
    type: str
    depth: int
    forward: int
    backward: int
    parameters: int
    optimizer: int = 0
    figures: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ModuleReport(AsJSON):
    """The calls of a program in order, and a summary of its signature."""

    program: str
    rows: tuple[ModuleRow, ...]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [{key: value for key, value in asdict(row).items() if key != "figures"} for row in self.rows]
        return {**asdict(self), "rows": rows}


def module_report(program: FlatProgram, *, depth: int | None = None) -> ModuleReport:
    """Count what each call holds; `depth` limits how deep the rows go (the program is 0)."""
    counts = _counts_by_call(program)
    sizes = _sizes_by_path(program)
    rows = [row for row in _module_rows(program, counts, sizes) if depth is None or row.depth <= depth]
    return ModuleReport(
        program.name,
        tuple(rows),
        dict(Counter(row.kind.value for row in program.signature.inputs)),
        dict(Counter(row.kind.value for row in program.signature.outputs)),
    )


@dataclass(frozen=True)
class FoldedRow:
    """A row that stands for `times` equal siblings; `last` is the path of the last of them."""

    row: ModuleRow
    times: int
    last: str


def counted(rows: Iterable[ModuleRow]) -> list[str]:
    """The columns of counts that a table of rows has; only a step has an optimizer."""
    steps = ["optimizer"] if any(row.optimizer for row in rows) else []
    return ["forward", "backward", *steps, "parameters"]


def count_cells(row: ModuleRow, names: Iterable[str]) -> list[str]:
    """The counts of a row as a table shows them: what there is none of is left out."""
    return [f"{count:,}" if count else "" for count in (getattr(row, name) for name in names)]


def folded(rows: tuple[ModuleRow, ...]) -> list[FoldedRow]:
    """The rows with neighbouring equal subtrees shown once."""
    return [folded for group in _runs(_subtrees(rows)) for folded in _rows_shown(group)]


def _subtrees(rows: Sequence[ModuleRow]) -> list[tuple[ModuleRow, ...]]:
    """The rows cut before every row of the least depth."""
    starts = [i for i, row in enumerate(rows) if row.depth == rows[0].depth]
    return [tuple(rows[start:end]) for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


def _runs(subtrees: Sequence[tuple[ModuleRow, ...]]) -> Iterator[list[tuple[ModuleRow, ...]]]:
    for _, run in groupby(subtrees, key=_shape):
        yield list(run)


def _shape(subtree: tuple[ModuleRow, ...]) -> tuple[object, ...]:
    """What must be equal for two subtrees to be shown as one: everything but their own names."""
    top = subtree[0].depth
    return tuple((astuple(r)[2:], r.path.rpartition(".")[2] if r.depth > top else "") for r in subtree)


def _rows_shown(group: list[tuple[ModuleRow, ...]]) -> Iterator[FoldedRow]:
    first = group[0]
    if len(group) < FOLD_FROM:
        for head, *below in group:
            yield FoldedRow(head, 1, head.path)
            yield from folded(tuple(below)) if below else ()
        return
    yield FoldedRow(first[0], len(group), group[-1][0].path)
    yield from folded(first[1:]) if len(first) > 1 else ()


def _counts_by_call(program: FlatProgram) -> Counter[tuple[int, Phase]]:
    origins = [origin_of(node) for node in program.nodes() if node.op == "call_function"]
    return Counter(
        (call, origin.phase) for origin in origins for call in program.calls.around(origin.made_in)
    )


def _sizes_by_path(program: FlatProgram) -> list[tuple[tuple[str, ...], int]]:
    rows = (row for row in program.signature.state if row.kind is InputKind.PARAMETER)
    return [(tuple(row.path.split(".")), row.value.numel()) for row in rows if isinstance(row.value, Tensor)]


def _module_rows(
    program: FlatProgram, counts: Counter[tuple[int, Phase]], sizes: list[tuple[tuple[str, ...], int]]
) -> Iterator[ModuleRow]:
    for call in program.calls.rows:
        path = call.site.path
        yield ModuleRow(
            path=str(path),
            index=call.site.index,
            type=call.site.type,
            depth=len(program.calls.chain(call)),
            forward=counts[call.number, Phase.FORWARD],
            backward=counts[call.number, Phase.BACKWARD],
            optimizer=counts[call.number, Phase.OPTIMIZER],
            parameters=sum(size for held, size in sizes if held[: len(path)] == tuple(path)),
        )
