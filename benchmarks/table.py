"""The results as one page."""

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks.results import Kind, Result, Sample, Target, Verdict

LEFT = {"what", "against", "verdict"}
STYLES = {Verdict.MET: "green", Verdict.MISSED: "yellow", Verdict.FAR: "bold red"}


def table(results: Sequence[Result]) -> Table:
    """One line each, every group under its title."""
    page = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("what", "against", "layers", "ours", "PyTorch's", "ratio", "target", "verdict"):
        page.add_column(column, justify="left" if column in LEFT else "right")
    for group, members in groupby(results, lambda result: result.subject.group):
        page.add_row(Text(group, style="bold"))
        for result in members:
            page.add_row(*_cells(result))
        page.add_section()
    return page


def _cells(result: Result) -> tuple[str | Text, ...]:
    subject, figures, verdict = result.subject, result.figures, result.verdict
    return (
        "  " + subject.what,
        subject.against or figures.note,
        str(subject.layers or ""),
        _measured(figures.ours, figures.unit),
        _measured(figures.theirs, figures.unit),
        ratio_text(result),
        target_text(result.target, figures.unit),
        Text(verdict, style=STYLES[verdict]) if verdict else "",
    )


def _measured(sample: Sample | None, unit: str) -> str:
    return f"{sample.median:.3g} {unit}" if sample else ""


def ratio_text(result: Result) -> str:
    """How many times faster, or what share of PyTorch's time; nothing where ours stands alone."""
    if result.value is None or result.target is None or result.target.kind is Kind.AMOUNT:
        return ""
    if result.target.kind is Kind.FASTER:
        return f"{result.value:.1f}× faster"
    return f"{result.value:.3f}×"


def target_text(target: Target | None, unit: str) -> str:
    """The bound in words."""
    if target is None:
        return ""
    match target.kind:
        case Kind.FASTER:
            return f"≥ {target.bound:g}×"
        case Kind.LONGER:
            return f"≤ {target.bound:g}×"
        case Kind.AMOUNT:
            return f"≤ {target.bound:g} {unit}"
