"""Which rows of long tables `make test` runs; the others are sweeps, which CI runs beside it.

A table runs `ROWS` of its rows there, or as many as its mark `sample(count)` says: in as few as possible
is every value of every parameter, and every word in the names of rows, so that a product of models and modes
shows each of both.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from zlib import crc32

import pytest

ROWS = 8


def mark_sweeps(items: Iterable[pytest.Item]) -> None:
    """Mark what is not in the sample of its test as a sweep."""
    tables: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
    counts: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("sample")
        if item.get_closest_marker("slow"):
            continue
        test, _, row = item.nodeid.partition("[")
        tables[test][row] = item
        counts[test] = ROWS if mark is None else mark.args[0]
    for test, rows in tables.items():
        for row in rows.keys() - sample(rows, counts[test]):
            rows[row].add_marker(pytest.mark.sweep)


def sample(rows: Mapping[str, object], count: int) -> set[str]:
    """Names of rows that have as many words as so many can have. Where several are as good, the name decides:
    tests of the same models take the same ones, and a new row changes little."""
    left = {row: frozenset(re.split(r"[-\]]", row)) for row in sorted(rows, key=_drawn)}
    seen, chosen = set[str](), set[str]()
    while left and len(chosen) < count:
        best = max(left, key=lambda row: len(left[row] - seen))
        seen |= left.pop(best)
        chosen.add(best)
    return chosen


def _drawn(row: str) -> int:
    return crc32(row.encode())
