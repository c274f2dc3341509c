"""Models of published size on the meta device; each needs a fresh process, whose memory is then known."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import whence
from benchmarks.captures import joint_program
from benchmarks.models import batch, labelled, large_llama, llama, meta_batch
from benchmarks.results import Figures, Sample
from benchmarks.timing import alone

KIB_PER_GIB = 2**20
LENGTH = 128
REPEATS = 5


@dataclass(frozen=True)
class _Measured:
    """What the captures of one size took."""

    time: Sample
    gibibytes: float
    nodes: int


def joint_time(size: str) -> Figures:
    """Seconds of a joint capture."""
    found = _measured(size)
    return Figures(found.time, None, "s", f"{found.nodes:,} nodes")


def memory(size: str) -> Figures:
    """What a forward and a joint capture, both held, add to the process."""
    return Figures(Sample(_measured(size).gibibytes, 1), None, "GiB", "forward and joint program held")


@cache
def _measured(size: str) -> _Measured:
    joint_program(llama(2), labelled(batch()))  # what is loaded once is not added by a model
    model, inputs = large_llama(size), labelled(meta_batch(1, LENGTH))
    before = _held()
    forward, joint = whence.capture(model, (), inputs), joint_program(model, inputs)
    added = (_peak() - before) / KIB_PER_GIB
    nodes = len(joint.graph.nodes)
    del forward, joint
    return _Measured(alone(lambda: joint_program(model, inputs), REPEATS), added, nodes)


def _held() -> int:
    """The memory this process holds, in KiB; the highest mark starts again from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """The most memory this process has held, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
