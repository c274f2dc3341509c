"""Reshapes whose copy depends on sizes: written so that a run decides again, as eager does.

A reshape copies where no view has the wanted shape. PyTorch decides that inside a kernel, and the recording
of a capture with open sizes shows what it decided for the example: a clone. At a size of 1, where strides
mean nothing, eager takes a view, and a product of a matrix in another layout has other last bits.
"""

from collections.abc import Container

import torch
from torch import fx

from whence._torch.sizes import is_symbolic

_ATEN = torch.ops.aten


def decide_again(graph: fx.Graph, written: Container[fx.Node]) -> None:
    """Write the copy that a reshape with open sizes made as the reshape; not that of a value `written`."""
    for node in graph.find_nodes(op="call_function", target=_ATEN._unsafe_view.default):
        copy = node.args[0]
        if not isinstance(copy, fx.Node) or not _copies(copy) or list(copy.users) != [node]:
            continue
        source = copy.args[0]
        if source not in written and any(map(is_symbolic, node.meta["val"].shape)):
            node.target, node.args = _ATEN.reshape.default, (source, *node.args[1:])


def _copies(node: fx.Node) -> bool:
    layout = node.kwargs.get("memory_format")
    return node.target is _ATEN.clone.default and layout is torch.contiguous_format
