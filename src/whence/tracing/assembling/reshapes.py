"""Reshapes whose copy depends on sizes: written so that a run decides again, as eager does.

A reshape copies where no view has the wanted shape. PyTorch decides that inside a kernel, and the recording
of a capture with open sizes shows what it decided for the example: a clone. At a size of 1, where strides
mean nothing, eager takes a view, and a product of a matrix in another layout has other last bits.

One thing no reshape can decide in a run. The backward of a product multiplies in another order where a matrix
lies in memory column by column, and the order was recorded. Where that view would lie so, a size of 1 is
ruled out.
"""

from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from whence._torch.operators.composites import MAY_VIEW
from whence._torch.operators.schemas import traits
from whence._torch.sizes.symbols import expression, is_symbolic
from whence.program.node_records import origin_of
from whence.schema import Phase

if TYPE_CHECKING:
    from whence._torch.sizes.environment import SizeEnvironment

_ATEN = torch.ops.aten
_DECIDING: Mapping[Any, Any] = {
    _ATEN.clone.default: _ATEN.contiguous.default,
    _ATEN._reshape_copy.default: _ATEN.reshape.default,
}
_PRODUCTS = frozenset({_ATEN.mm.default, _ATEN.addmm.default})


def decide_again(graph: fx.Graph, written: Container[fx.Node], environment: "SizeEnvironment") -> None:
    """Write the copy that a reshape with open sizes made as the reshape.

    Not that of a value `written`: where it is a view at a size of 1, that size is ruled out.
    """
    for node in graph.nodes:
        if not node.meta.pop(MAY_VIEW, False):
            continue
        if any(row in written for row in _looked_into(node)):
            source: Any = node.args[0]
            _rule_out(node, _symbols(source.meta["val"]), environment)
        else:
            node.target, node.kwargs = _DECIDING[node.target], {}
    for node in graph.find_nodes(op="call_function", target=_ATEN._unsafe_view.default):
        copy = node.args[0]
        if not isinstance(copy, fx.Node) or not _copies(copy) or list(copy.users) != [node]:
            continue
        source = copy.args[0]
        if source not in written and any(map(is_symbolic, node.meta["val"].shape)):
            node.target, node.args = _ATEN.reshape.default, (source, *node.args[1:])


def _looked_into(node: fx.Node) -> Iterator[fx.Node]:
    """The node, what it was given, and what that is a view of."""
    yield node
    source = node.args[0]
    while isinstance(source, fx.Node):
        yield source
        at = traits(source.target).viewed
        source = None if at is None else source.args[at]


def _rule_out(node: fx.Node, symbols: Iterator[Any], environment: "SizeEnvironment") -> None:
    origin = origin_of(node)
    path = origin.calls[0].path if origin.calls else None
    for symbol in symbols:
        environment.rule_out_one(symbol, (path, origin.source))


def rule_out_ones(graph: fx.Graph, environment: "SizeEnvironment") -> None:
    """Require that sizes are not 1 where a recorded backward would then multiply in another order."""
    for node in graph.find_nodes(op="call_function", target=_ATEN.reshape.default):
        source: Any = node.args[0]
        if not any(map(_is_differentiated_product, node.users)):
            continue
        value, symbols = source.meta["val"], _symbols(source.meta["val"])
        found = (s for s in symbols if _lies_in_columns(value, node.meta["val"], s, environment))
        _rule_out(node, found, environment)


def _is_differentiated_product(node: fx.Node) -> bool:
    return node.target in _PRODUCTS and origin_of(node).phase is Phase.FORWARD


def _symbols(value: Tensor) -> Iterator[Any]:
    """The symbols that are sizes of a tensor by themselves, and more than 1 in the example."""
    sizes: Any = value.shape
    for size in sizes:
        if is_symbolic(size) and expression(size).is_Symbol and size.node.hint not in (None, 1):
            yield expression(size)


def _lies_in_columns(source: Tensor, result: Tensor, symbol: Any, environment: "SizeEnvironment") -> bool:
    """Whether eager's reshape gives a matrix whose columns lie in memory one by one where `symbol` is 1."""
    try:
        shape, strides, wanted = (
            [environment.with_one(size, symbol) for size in sizes]
            for sizes in (source.shape, source.stride(), result.shape)
        )
    except ZeroDivisionError:  # no call has such a size
        return False
    found = torch.empty_strided(shape, strides, device="meta").reshape(wanted)
    rows, columns = found.stride()
    return rows == 1 and columns == found.shape[0] and found.shape[1] > 1


def _copies(node: fx.Node) -> bool:
    layout = node.kwargs.get("memory_format")
    return node.target is _ATEN.clone.default and layout is torch.contiguous_format
