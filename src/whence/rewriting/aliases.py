"""Which recorded values look into one memory, as operators say of themselves.

Fake tensors do not tell where sizes are symbols: those of one layout share what stands for memory.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import getitem

from torch import fx

from whence._torch.operators.schemas import traits, written_nodes


def memory_of(nodes: Iterable[fx.Node]) -> Callable[[fx.Node], fx.Node]:
    """For each of the nodes, which are in order, the first that looks into its memory."""
    bases: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = _looked_into(node)
        if source is not None and (node.target is not getitem or source in bases):
            bases[node] = bases.get(source, source)
    return lambda node: bases.get(node, node)


def owner_of(node: fx.Node) -> fx.Node:
    """The first value that looks into the memory of one: an input, or what an operator has made."""
    source = _looked_into(node)
    if source is None or (node.target is getitem and _looked_into(source) is None):
        return node
    return owner_of(source)


def _looked_into(node: fx.Node) -> fx.Node | None:
    """The argument into whose memory the result of a node looks, or may look."""
    viewed = 0 if node.target is getitem else traits(node.target).viewed
    seen = () if viewed is None else node.args[viewed : viewed + 1]
    return next((source for source in chain(written_nodes(node), seen) if isinstance(source, fx.Node)), None)
