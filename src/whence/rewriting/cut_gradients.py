"""Keep gradients stopped where the model stopped them.

A forward-only program is differentiated by autograd when it runs, and autograd would walk straight through
what the model computed under `no_grad`. Each value that enters such a region and carries a gradient is
detached.

An in-place operation under `no_grad` is different: it changes the number and leaves the gradient as if
nothing had happened (`F.cosine_similarity` clamps its norms so). Its functional twin must pass the gradient
straight through.
"""

from collections.abc import Callable, Mapping, Set

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import traits
from whence._torch.sizes.symbols import SYMBOLIC
from whence.program.node_records import origin_of, set_origin

_DETACH = torch.ops.aten.detach.default


def cut_gradients(
    graph: fx.Graph,
    sources: Mapping[fx.Node, fx.Node],
    ran_without: Callable[[fx.Node], bool],
    *,
    any_input: bool = False,
) -> frozenset[str]:
    """Insert `detach` in front of operations that were recorded without grad mode. With `any_input` each
    input may need a gradient, whatever that of the example did.

    `sources` leads from a node of the functional form to the recorded one, of which `ran_without` says
    whether gradients stop there. Returns the names of the nodes that pass the gradient of their first
    argument straight through.
    """

    def is_cut(node: fx.Node) -> bool:
        return ran_without(sources.get(node, node))

    nodes = list(graph.nodes)
    while nodes and not is_cut(nodes[-1]):
        nodes.pop()
    carrying: set[fx.Node | None] = set()
    detached: dict[fx.Node, fx.Node] = {}
    straight: list[str] = []
    for node in nodes:
        if node.op == "placeholder" or not is_cut(node):
            is_carrying = carries_gradient(node, carrying, any_input=any_input)
        else:
            held = _written_argument(node, sources)
            _detach_inputs(graph, node, carrying - {held}, detached)
            is_carrying = held in carrying
            straight += [node.name] if is_carrying else []
        if is_carrying:
            carrying.add(node)
    return frozenset(straight)


def carries_gradient(node: fx.Node, carrying: Set[fx.Node | None], *, any_input: bool = False) -> bool:
    """Whether autograd follows the value of a node, where it follows those `carrying` among its sources.

    With `any_input` each input may need a gradient, whatever that of the example did.
    """
    value = node.meta.get("val")
    if node.op == "placeholder":
        return isinstance(value, Tensor) and (
            value.requires_grad or (any_input and value.is_floating_point())
        )
    return not isinstance(value, SYMBOLIC) and not carrying.isdisjoint(node.all_input_nodes)


def _written_argument(node: fx.Node, sources: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The value that the recorded operation wrote in place."""
    recorded = sources.get(node)
    first = node.args[0] if node.args else None
    wrote = recorded is not None and 0 in traits(recorded.target).mutates
    return first if wrote and isinstance(first, fx.Node) else None


def _detach_inputs(
    graph: fx.Graph, node: fx.Node, carrying: Set[fx.Node | None], detached: dict[fx.Node, fx.Node]
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
