"""Which calls keep the calling convention of the original."""

from collections.abc import Sequence

from whence.errors import Fault, SelectionError
from whence.program.calls import Calls
from whence.program.queries.selecting import near_paths
from whence.provenance import PathPattern


def preserved_calls(calls: Calls, patterns: Sequence[str], entry: int) -> frozenset[int]:
    """The numbers of the calls whose path fits a pattern, without `entry`, the model itself.

    Raises `SelectionError` naming every pattern that fits no call, and near misses.
    """
    found: set[int] = set()
    faults: list[Fault] = []
    for text in patterns:
        pattern = PathPattern.parse(text)
        fitting = {row.number for row in calls if row.number != entry and pattern.matches(row.site.path)}
        found |= fitting
        if not fitting:
            faults.append(Fault(f"no module that is called fits {text!r}", remedy=near_paths(text, calls)))
    if faults:
        raise SelectionError.of(faults)
    return frozenset(found)
