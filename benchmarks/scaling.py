"""Joint capture of ever deeper models: the cost of a node should not depend on how many there are."""

from functools import cache

import whence
from benchmarks.captures import joint_program
from benchmarks.models import batch, labelled, llama
from benchmarks.results import Figures, Sample
from benchmarks.timing import alone

REPEATS = 3
"""A thousand layers take long."""


def joint(layers: int) -> Figures:
    """Seconds for one depth."""
    sample, nodes = _measured(layers)
    return Figures(sample, None, "s", f"{nodes:,} nodes, {_microseconds(layers):.0f} µs each")


def growth(deep: int, shallow: int) -> Figures:
    """How much more a node costs in the deeper model than in the shallower one."""
    return Figures(Sample(_microseconds(deep) / _microseconds(shallow), REPEATS), None, "×")


def _microseconds(layers: int) -> float:
    sample, nodes = _measured(layers)
    return 1e6 * sample.median / nodes


@cache
def _measured(layers: int) -> tuple[Sample, int]:
    """Seconds, and how many nodes each capture had."""
    model, inputs = llama(layers), labelled(batch())
    joint_program(llama(2), inputs)
    nodes: set[int] = set()

    def work() -> whence.Program:
        program = joint_program(model, inputs)
        nodes.add(len(program.graph.nodes))
        return program

    sample = alone(work, REPEATS)
    (count,) = nodes
    return sample, count
