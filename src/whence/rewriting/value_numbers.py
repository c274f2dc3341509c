"""What tells computed values apart: two nodes with one key compute the same."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import fx


def computed_of(node: fx.Node, known: Callable[[fx.Node], fx.Node]) -> Hashable:
    """The arguments of a node, among which each value is the one that is `known` for it."""
    return _key(node.args, known), _key(node.kwargs, known)


def _key(argument: Any, known: Callable[[fx.Node], fx.Node]) -> Hashable:
    """1, 1.0 and True are not the same argument, and neither are 0.0 and -0.0."""
    if isinstance(argument, fx.Node):
        return known(argument)
    if isinstance(argument, (list, tuple)):
        return (type(argument).__name__, *(_key(item, known) for item in argument))
    if isinstance(argument, Mapping):
        return tuple((name, _key(item, known)) for name, item in argument.items())
    return type(argument), repr(argument)
