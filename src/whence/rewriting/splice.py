"""Write into a graph what one of its operations is made of, in its place."""

import importlib
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.decompositions import Operation
from whence._torch.operators.schemas import short_name
from whence._torch.sizes.symbols import SYMBOLIC, expression, number_of

aten = torch.ops.aten
Inherit = Callable[[fx.Node], None]
"""Writes on a new node what it takes over from the one whose place it takes."""


class UnknownValueError(ValueError):
    """A value that comes from nowhere in the graph."""


def called_again(node: fx.Node, function: Callable[..., Any], values: Mapping[fx.Node, Any]) -> Any:
    """What a function returns for the arguments of a node, whose sources have these values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: values[source])
    return function(*args, **kwargs)


class Splice:
    """Writes operations in front of a node; `values` are what they saw of the node's sources."""

    def __init__(self, node: fx.Node, values: Mapping[fx.Node, Any], inherit: Inherit) -> None:
        self.node = node
        self._inherit = inherit
        self._nodes = {id(value): source for source, value in values.items()}
        self._sizes = values
        self._alive: list[Any] = list(values.values())

    def add(self, operation: Operation) -> None:
        args, kwargs = self._mapped(operation.args), self._mapped(dict(operation.kwargs))
        made = self._node(operation.target, args, kwargs, operation.value)
        self._keep(made, operation.result, operation.value)

    def known(self, value: Any) -> Any:
        """The node, or the nodes, of a value; raises `UnknownValueError`."""
        if isinstance(value, (tuple, list)):
            return [self.known(item) for item in value]
        return self._mapped(value)

    def _keep(self, made: fx.Node, result: Any, value: Any) -> None:
        self._alive.append(result)
        if isinstance(result, (tuple, list)):
            for position, item in enumerate(result):
                if item is not None:
                    node = self._node(operator.getitem, (made, position), {}, value[position])
                    self._keep(node, item, value[position])
        else:
            self._nodes[id(result)] = made

    def _node(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        graph = self.node.graph
        with graph.inserting_before(self.node):
            made = graph.create_node("call_function", target, args, kwargs, short_name(target))
        made.meta["val"] = value
        self._inherit(made)
        return made

    def _mapped(self, value: Any) -> Any:
        match value:
            case tuple():
                return tuple(map(self._mapped, value))
            case list():
                return [self._mapped(item) for item in value]
            case dict():
                return {key: self._mapped(item) for key, item in value.items()}
            case Tensor():
                return self._tensor(value)
        if isinstance(value, SYMBOLIC):
            return self._nodes.get(id(value)) or self._size(value)
        return value

    def _tensor(self, value: Tensor) -> fx.Node:
        found = self._nodes.get(id(value))
        if found is None:
            raise UnknownValueError("it makes a tensor that does not come from its arguments")
        return found

    def _size(self, size: Any) -> Any:
        found = expression(size)
        if found.is_number:
            return number_of(size)
        for source, value in self._sizes.items():
            if isinstance(value, Tensor):
                for axis, extent in enumerate(value.shape):
                    if expression(extent) == found:
                        return self._node(aten.sym_size.int, (source, axis), {}, size)
            elif isinstance(value, SYMBOLIC) and expression(value) == found:
                return source
        return self._computed(size, found)

    def _computed(self, size: Any, found: Any) -> fx.Node:
        known: dict[Any, Any] = {}
        for source, value in self._sizes.items():
            for axis, extent in enumerate(value.shape if isinstance(value, Tensor) else ()):
                symbol = expression(extent)
                if symbol.is_Symbol and symbol in found.free_symbols and symbol not in known:
                    known[symbol] = self._node(aten.sym_size.int, (source, axis), {}, extent)
        if not found.free_symbols <= known.keys():
            raise UnknownValueError(f"it computes the size {size}")

        def write(target: Any, args: Any, kwargs: Any, values: Any) -> fx.Node:
            return self._node(target, args, kwargs, target(*values[0], **values[1]))

        written: Callable[..., fx.Node] = importlib.import_module("whence._torch.sizes.proxies").written
        return written(known, found, write)


def replace_by(node: fx.Node, replacement: Any) -> list[tuple[fx.Node, Any]]:
    """Let everybody who reads a node read its replacement, one node or one for each of its items.

    The node goes, and what took its items out; returned are those with what replaces them.
    """
    gone: list[tuple[fx.Node, Any]] = []
    if isinstance(replacement, fx.Node):
        node.replace_all_uses_with(replacement)
    else:
        for user in list(node.users):
            if user.target is operator.getitem:
                item = replacement[user.args[1]]
                user.replace_all_uses_with(item)
                gone.append((user, item))
    gone.append((node, replacement))
    for each, _ in gone:
        each.graph.erase_node(each)
    return gone


def computed_of(node: fx.Node, known: Callable[[fx.Node], fx.Node]) -> Hashable:
    """The arguments of a node, among which each value is the one that is `known` for it."""
    return _key_of_argument(node.args, known), _key_of_argument(node.kwargs, known)


def _key_of_argument(argument: Any, known: Callable[[fx.Node], fx.Node]) -> Hashable:
    """1, 1.0 and True are not the same argument, and neither are 0.0 and -0.0."""
    if isinstance(argument, fx.Node):
        return known(argument)
    if isinstance(argument, (list, tuple)):
        return (type(argument).__name__, *(_key_of_argument(item, known) for item in argument))
    if isinstance(argument, Mapping):
        return tuple((name, _key_of_argument(item, known)) for name, item in argument.items())
    return type(argument), repr(argument)
