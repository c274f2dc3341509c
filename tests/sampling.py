"""Which rows of long tables `make test` runs; the others are sweeps, which CI runs beside it.

A table runs `ROWS` of its rows there, or as many as its mark `sample(count)` says: in as few as possible
is every value of every parameter, and every word in the names of rows, so that a product of models and modes
shows each of both. Rows of large models are in no sample that other rows are left for, but in those of
tests that are marked `sample(count, large=True)`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from zlib import crc32

import pytest

ROWS = 6
LARGE = frozenset(
    {"t5", "swin", "segformer", "mixtral", "qwen2_moe", "olmoe", "deberta_v2", "whisper", "bart"}
)
"""Names of models that take several times as long as others."""


def mark_sweeps(items: Iterable[pytest.Item]) -> None:
    """Mark what is not in the sample of its test as a sweep."""
    tables: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
    counts: dict[str, int] = {}
    large: set[str] = set()
    for item in items:
        mark = item.get_closest_marker("sample")
        if item.get_closest_marker("slow") or item.get_closest_marker("sweep"):
            continue
        test, _, row = item.nodeid.partition("[")
        tables[test][row] = item
        counts[test] = ROWS if mark is None else mark.args[0]
        if mark is not None and mark.kwargs.get("large"):
            large.add(test)
    for test, rows in tables.items():
        small = {row: item for row, item in rows.items() if test in large or not _words(row) & LARGE}
        for row in rows.keys() - sample(small or rows, counts[test]):
            rows[row].add_marker(pytest.mark.sweep)


def sample(rows: Mapping[str, object], count: int) -> set[str]:
    """Names of rows that have as many words as so many can have. Where several are as good, the name decides:
    tests of the same models take the same ones, and a new row changes little."""
    left = {row: _words(row) for row in sorted(rows, key=_drawn)}
    seen, chosen = set[str](), set[str]()
    while left and len(chosen) < count:
        best = max(left, key=lambda row: len(left[row] - seen))
        seen |= left.pop(best)
        chosen.add(best)
    return chosen


def is_drawn(name: str, one_in: int, draw: str) -> bool:
    """Whether a sweep is one of those that run where one in so many does: others in each draw."""
    return crc32(f"{draw} {name}".encode()) % one_in == 0


def _words(row: str) -> frozenset[str]:
    return frozenset(re.split(r"[-\]]", row))


def _drawn(row: str) -> int:
    return crc32(row.encode())
