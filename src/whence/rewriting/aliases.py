"""Which recorded values look into one memory, as operators say of themselves.

Fake tensors do not tell where sizes are symbols: those of one layout share what stands for memory.
"""

from collections.abc import Callable, Iterable
from operator import getitem

from torch import fx

from whence._torch.operators.schemas import looked_into


def memory_of(nodes: Iterable[fx.Node]) -> Callable[[fx.Node], fx.Node]:
    """For each of the nodes, which are in order, the first that looks into its memory."""
    bases: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = looked_into(node)
        if source is not None and (node.target is not getitem or source in bases):
            bases[node] = bases.get(source, source)
    return lambda node: bases.get(node, node)
