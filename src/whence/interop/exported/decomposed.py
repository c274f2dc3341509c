"""What is known of operations that `run_decompositions` made: what was known of those that it ran.

One that came through as it was is where it was called, as exactly as before. What another one was decomposed
into has taken over its metadata, and what a region held (`no_grad`, autocast) that of the region.
"""

import operator
from collections.abc import Sequence

from torch import fx

from whence._torch.export.programs import came_through, ran_for

_AS_EXPORTED = "TRAINING"
"""The dialect of a program that nobody decomposed."""


def made_by_decomposition(dialect: str, nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The operations that were not in the exported program: their modules are deduced."""
    if dialect == _AS_EXPORTED or not any(map(ran_for, nodes)):
        return frozenset()
    made: set[fx.Node] = set()
    for node in nodes:
        is_item = node.target is operator.getitem
        if (node.args[0] in made) if is_item else not came_through(node):
            made.add(node)
    return frozenset(made)
