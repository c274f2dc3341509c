"""Sizes as nodes of a recorded graph.

PyTorch's recorder gives every size the node where Python first met it, wherever that was, so that a module
takes its own batch size from whoever looked first. Here each size that an input has is one node at the
beginning of the program, and what is computed from sizes is spelled out anew by each call that uses it: equal
layers stay equal, and a module can be called alone.
"""

import importlib
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from whence._torch.sizes.drawn_numbers import spelled_number
from whence._torch.sizes.symbols import OuterNumber, expression, is_symbolic, number_of

if TYPE_CHECKING:
    from whence._torch.sizes.environment import SizeEnvironment

_ITEM = "_local_scalar_dense"
_SIZE = torch.ops.aten.sym_size.int
Create = Callable[[Any, tuple[Any, ...], dict[str, Any]], fx.Node]
"""Appends an operation to the graph."""


class SizeNodes:
    """The nodes that hold sizes: `bases` by symbol, others by who uses them.

    `create` appends a node; `user` tells apart who is being recorded, so that what one computes is not
    handed to another.
    """

    def __init__(
        self, environment: "SizeEnvironment", create: Create, user: Callable[[], object], tracer: fx.Tracer
    ) -> None:
        self._environment = environment
        self._create = create
        self._user = user
        self._tracer = tracer
        self._bases: dict[Any, fx.Node] = {}
        self._spelled: dict[tuple[object, Any], Any] = {}

    @property
    def bases(self) -> frozenset[fx.Node]:
        """The nodes that hold the sizes of inputs, for everybody."""
        return frozenset(self._bases.values())

    def read(self, tensor: fx.Node, dim: int, size: Any, scale: int, offset: int) -> None:
        """Let the base of a size, which is `scale` times it plus `offset`, be read from a tensor."""
        symbol = next(iter(expression(size).free_symbols))
        if symbol in self._bases:
            return
        node = self._made(_SIZE, (tensor, dim), size)
        if offset:
            node = self._made(operator.sub, (node, offset), size - offset)
        if scale != 1:
            node = self._made(operator.floordiv, (node, scale), (size - offset) // scale)
        self._bases[symbol] = node

    def is_held_by(self, node: fx.Node, number: Any) -> None:
        """Let a symbol that a node gives be known by that node."""
        found = expression(number)
        if found.is_Relational:
            # a truth is a symbol that is 1: the node gives the one, and what is made of it the other
            symbol = next(iter(found.free_symbols))
            self._bases[found] = node
            self._environment.names.setdefault(symbol, node.name.replace(_ITEM, "item"))
            one = self._environment.create_symintnode(symbol, hint=None)
            self.is_held_by(self._made(torch.sym_ite, (node, 1, 0), number), one)
        elif found.is_Symbol and found not in self._bases:
            self._bases[found] = node
            name = f"size_of_{node.args[0]}" if node.target is _SIZE else node.name.replace(_ITEM, "item")
            self._environment.names.setdefault(found, name)

    def knows(self, number: Any) -> bool:
        """Whether a number can be spelled with what is known: sizes of inputs, and what nodes gave."""
        return all(s in self._environment.names or s in self._bases for s in expression(number).free_symbols)

    def readable_names(self) -> dict[Any, str]:
        """What symbols are called; a number of a run by the tensor that it is read from."""
        read = {
            symbol: spelled_number(node.args[0])
            for symbol, node in self._bases.items()
            if symbol.is_Symbol and _ITEM in node.name
        }
        return {**self._environment.names, **read}

    def argument(self, number: Any, user: object = None) -> Any:
        """A size as the argument of an operation: a node, or the number where it is known after all.

        `user` is who asks, if not the one that is being recorded.
        """
        found = expression(number)
        if found.is_number:
            return number_of(number)
        if found in self._bases:
            return self._bases[found]
        key = (user or self._user(), found)
        if key not in self._spelled:
            self._spelled[key] = self.spelled_by(self._create, number)
        return self._spelled[key]

    def spelled_by(self, create: Create, number: Any) -> Any:
        """A node for a size, made of nodes that `create` appends."""
        found = expression(number)
        if found.is_number:
            return number_of(number)
        if not found.free_symbols <= self._bases.keys():
            raise OuterNumber

        def write(target: Any, args: Any, kwargs: Any, values: Any) -> fx.Node:
            node = create(target, args, kwargs)
            if target is operator.truediv and is_symbolic(values[0][1]):
                self._environment.require_nonzero(values[0][1])
            node.meta["val"] = target(*values[0], **values[1])
            return node

        known = {symbol: self._bases[symbol] for symbol in found.free_symbols}
        return importlib.import_module("whence._torch.sizes.proxies").written(known, found, write)

    def _made(self, target: Any, args: tuple[Any, ...], size: Any) -> fx.Node:
        node = self._create(target, args, {})
        node.meta["val"] = size
        return node


def bases_of(sizes: SizeNodes | None) -> frozenset[fx.Node]:
    """The nodes that hold the sizes of inputs; none where all sizes are numbers."""
    return frozenset() if sizes is None else sizes.bases


class Slots:
    """What PyTorch's recorder asks for the node of a size, in the place of its own table."""

    def __init__(self, nodes: SizeNodes) -> None:
        self._nodes = nodes

    def __contains__(self, number: Any) -> bool:
        return self._nodes.knows(number)

    def get(self, number: Any, _default: object = None) -> "_LateNode":
        """Where the node of a size is made when it is asked for."""
        return _LateNode(self._nodes, number)

    __getitem__ = get

    def __setitem__(self, number: Any, thunk: Any) -> None:
        """A result that is a number, or has a size, that nobody knew before."""
        if not self._nodes.knows(number):
            self._nodes.is_held_by(thunk.force().node, number)

    def __len__(self) -> int:
        return 0


class _LateNode:
    """The node of one size, for later."""

    def __init__(self, nodes: SizeNodes, number: Any) -> None:
        self._nodes = nodes
        self._number = number

    def force(self) -> Any:
        """The node, as PyTorch's recorder passes it on."""
        node = self._nodes.argument(self._number)
        return fx.Proxy(node, self._nodes._tracer) if isinstance(node, fx.Node) else node
