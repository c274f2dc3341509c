"""Order parts so that each runs after everything it waits for, as close to a given ranking as possible."""

import heapq
from collections.abc import Mapping
from typing import TypeVar

Part = TypeVar("Part", bound=str | int)


class CyclicError(ValueError):
    """Some parts wait for each other in a circle; `parts` are those on one."""

    def __init__(self, parts: frozenset[str | int]) -> None:
        super().__init__(f"parts wait for each other: {sorted(map(str, parts))}")
        self.parts = parts


def topological(waits: Mapping[Part, set[Part]], rank: Mapping[str | int, int]) -> tuple[Part, ...]:
    """The parts in order, the lowest rank first among those that are ready; raises `CyclicError`."""
    missing = {part: len(sources) for part, sources in waits.items()}
    followers: dict[Part, list[Part]] = {part: [] for part in waits}
    for part, sources in waits.items():
        for source in sources:
            followers[source].append(part)
    ready = [(rank[part], position, part) for position, part in enumerate(waits) if not missing[part]]
    heapq.heapify(ready)
    ordered: list[Part] = []
    while ready:
        _, _, part = heapq.heappop(ready)
        ordered.append(part)
        for follower in followers[part]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (rank[follower], len(ordered) + len(waits), follower))
    if len(ordered) < len(waits):
        raise CyclicError(_circle(waits, frozenset(ordered)))
    return tuple(ordered)


def _circle(waits: Mapping[Part, set[Part]], done: frozenset[Part]) -> frozenset[str | int]:
    """The parts of one circle, found by walking back along what is still waited for."""
    part = next(part for part in waits if part not in done)
    walked: list[Part] = []
    while part not in walked:
        walked.append(part)
        part = next(source for source in waits[part] if source not in done)
    return frozenset(walked[walked.index(part) :])
