"""How a median is taken."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.results import Figures, Sample

Work = Callable[[], Any]

UNMEASURED = 10
"""Short work runs this often before it counts."""


@dataclass(frozen=True)
class Repeats:
    """How often each side runs; PyTorch's long ones run less often."""

    ours: int
    theirs: int


def compared(ours: Work, theirs: Work, repeats: Repeats) -> Figures:
    """Seconds of both sides, in turns as long as both have runs left: so both meet the same machine."""
    our_times: list[float] = []
    their_times: list[float] = []
    for turn in range(max(repeats.ours, repeats.theirs)):
        if turn < repeats.theirs:
            their_times.append(collected(theirs))
        if turn < repeats.ours:
            our_times.append(collected(ours))
    return Figures(_sample(our_times), _sample(their_times), "s")


def alone(work: Work, repeats: int) -> Sample:
    """Seconds of work that is compared with nothing."""
    return _sample([collected(work) for _ in range(repeats)])


def compared_short(ours: Work, theirs: Work, repeats: int) -> Figures:
    """Milliseconds of both sides, in turns."""
    our_times: list[float] = []
    their_times: list[float] = []
    for _ in range(repeats + UNMEASURED):
        our_times.append(1e3 * _once(ours))
        their_times.append(1e3 * _once(theirs))
    return Figures(_sample(our_times[UNMEASURED:]), _sample(their_times[UNMEASURED:]), "ms")


def in_a_row(work: Work, repeats: int) -> Sample:
    """Milliseconds of short work that is repeated by itself."""
    return _sample([1e3 * _once(work) for _ in range(repeats + UNMEASURED)][UNMEASURED:])


def collected(work: Work) -> float:
    """Seconds of one run that does not pay for the garbage of the one before."""
    gc.collect()
    return _once(work)


def _once(work: Work) -> float:
    start = time.perf_counter()
    result = work()
    end = time.perf_counter()
    del result  # taking it down is not part of making it
    return end - start


def _sample(times: list[float]) -> Sample:
    return Sample(median(times), len(times))
