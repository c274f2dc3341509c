"""Where in the user's model something is that a program cannot hold."""

from torch import fx

from whence.errors import Place
from whence.interop.frames import STACK, segments
from whence.interop.lines import source_of


def place_of(node: fx.Node) -> Place:
    """The module and the line of a node of an exported graph, as far as it says."""
    stack = node.meta.get(STACK) or {}
    paths = [str(segments(str(raw))) for raw, *_ in stack.values()]
    line = source_of(node)
    return Place(paths[-1] if paths else None, None if line is None else str(line))
