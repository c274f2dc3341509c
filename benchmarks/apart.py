"""Rows in fresh processes: what one leaves in memory, or to the garbage collector, is not the next one's."""

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.results import Result, result_from_dict
from benchmarks.rows import TABLES, Row

ROOT = Path(__file__).parents[1]


def measured(table: str, rows: Sequence[Row], threads: int) -> Iterator[Result]:
    """The results in order, each as soon as it is there; rows of one process that stand together share it."""
    for _, together in groupby(rows, lambda row: row.process):
        names = [row.subject.name for row in together]
        command = [sys.executable, "-m", "benchmarks.apart", table, str(threads), *names]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                yield result_from_dict(json.loads(line))
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)


def main(table: str, threads: str, *names: str) -> None:
    """The other end: a line of JSON for each row."""
    torch.set_num_threads(int(threads))
    _quiet()
    rows = {row.subject.name: row for row in TABLES[table]()}
    for name in names:
        sys.stdout.write(json.dumps(rows[name].run().to_dict()) + "\n")
        sys.stdout.flush()


def _quiet() -> None:
    """PyTorch's own road warns of a global that transformers sets, and about its own copies of tree specs."""
    warnings.filterwarnings("ignore", "While compiling, we found certain side effects", UserWarning)
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)


if __name__ == "__main__":
    main(*sys.argv[1:])
