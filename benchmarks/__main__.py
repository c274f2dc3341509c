"""`python -m benchmarks [NAME …]`: measure all rows, or those named, print the table and write JSON."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.apart import measured
from benchmarks.report import Machine, Report
from benchmarks.results import Result, Verdict, exit_status
from benchmarks.rows import TABLES, Row
from benchmarks.table import ratio_text, table

WRITTEN = Path(__file__).parent / "results.json"
MISSED = frozenset({Verdict.MISSED, Verdict.FAR})
FAR = frozenset({Verdict.FAR})
WIDTH_WITHOUT_TERMINAL = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when a target is missed; with `--smoke`, only when it is missed by half."""
    parser = _parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    machine = Machine.here()
    name = "smoke" if options.smoke else "full"
    rows = _selected(TABLES[name](), options.names, parser)
    results = tuple(_with_progress(rows, measured(name, rows, options.threads)))
    _show(machine, results)
    path = options.json or (None if options.smoke or options.names else WRITTEN)
    if path:
        Report(machine, results).write(path)
    return exit_status(results, failing=FAR if options.smoke else MISSED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a row (an unknown name lists them)")
    parser.add_argument("--smoke", action="store_true", help="a quick look; fail only far below a target")
    parser.add_argument(
        "--json", type=Path, help=f"where to write; for a full run {WRITTEN.name} beside this"
    )
    parser.add_argument("--threads", type=int, default=1, help="for both sides (default: 1, the steadiest)")
    return parser


def _selected(rows: list[Row], names: list[str], parser: argparse.ArgumentParser) -> list[Row]:
    known = [row.subject.name for row in rows]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [row for row in rows if not names or row.subject.name in names]


def _with_progress(rows: Sequence[Row], results: Iterator[Result]) -> Iterator[Result]:
    """A moving line in a terminal, and one line for each row that is done, apart from the table."""
    console = Console(stderr=True, highlight=False)
    for number, row in enumerate(rows, 1):
        name = f"{number}/{len(rows)} {row.subject.name}"
        start = time.perf_counter()
        with console.status(name):
            result = next(results)
        took = f"in {time.perf_counter() - start:.1f} s"
        console.print(", ".join(filter(None, (name, ratio_text(result), result.verdict, took))), markup=False)
        yield result


def _show(machine: Machine, results: Sequence[Result]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    console.print(table(results))
    console.print(str(machine), markup=False)


if __name__ == "__main__":
    sys.exit(main())
