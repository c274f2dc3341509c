"""Keep gradients stopped where the model stopped them.

A forward-only program is differentiated by autograd when it runs, and autograd would walk straight through what
the model computed under `no_grad`. Each value that enters such a region and carries a gradient is detached.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from whence.program.origins import origin_of, set_origin
from whence.tracing.session import Mark

_DETACH = torch.ops.aten.detach.default


def cut_gradients(graph: fx.Graph, marks: Mapping[fx.Node, Mark], custom: frozenset[int]) -> None:
    """Insert `detach` in front of operations recorded without grad mode; `custom` autograd functions excepted."""
    carrying: set[fx.Node] = set()
    detached: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        mark = marks.get(node)
        if node.op == "placeholder":
            carries = isinstance(value := node.meta.get("val"), Tensor) and value.requires_grad
        elif mark is not None and mark.cut and mark.moment not in custom:
            _detach_inputs(graph, node, carrying, detached)
            carries = False
        else:
            carries = any(source in carrying for source in node.all_input_nodes)
        if carries:
            carrying.add(node)


def _detach_inputs(
    graph: fx.Graph, node: fx.Node, carrying: set[fx.Node], detached: dict[fx.Node, fx.Node]
) -> None:
    for source in node.all_input_nodes:
        if source not in carrying:
            continue
        if source not in detached:
            detached[source] = _detach_before(graph, node, source)
        node.replace_input_with(source, detached[source])


def _detach_before(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    with graph.inserting_before(node):
        made = graph.call_function(_DETACH, (source,))
    made.meta["val"] = source.meta["val"]
    set_origin(made, origin_of(node))
    return made
