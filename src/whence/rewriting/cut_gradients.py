"""Keep gradients stopped where the model stopped them.

A forward-only program is differentiated by autograd when it runs, and autograd would walk straight through
what the model computed under `no_grad`. Each value that enters such a region and carries a gradient is
detached.

An in-place operation under `no_grad` is different: it changes the number and leaves the gradient as if
nothing had happened (`F.cosine_similarity` clamps its norms so). What holds the new number must pass the
gradient straight through to what was overwritten.

Some operations hand on a gradient of zeros where they write, and their functional twins none (`normal_`,
`gt_`, `copy_`). What was written is chosen there over what had a history, by a condition that always says so.
"""

from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.autograd.replaced_data import PUTS_DATA
from whence._torch.graphs import fake_result
from whence._torch.operators.schemas import functional_twin
from whence._torch.operators.table import said_of
from whence._torch.refusals import data_replaced
from whence._torch.sizes.symbols import SYMBOLIC
from whence.program.node_records import origin_of, place_of, set_origin
from whence.program.queries.marks import READS_NO_VALUE
from whence.rewriting.functionalize import Functional

aten = torch.ops.aten
_DETACH = aten.detach.default


def cut_gradients(
    functional: Functional, ran_without: Callable[[fx.Node], bool], *, open_inputs: Collection[fx.Node] = ()
) -> frozenset[str]:
    """Insert `detach` in front of operations that were recorded without grad mode. Each of `open_inputs` may
    need a gradient, whatever that of the example did.

    `ran_without` says of a recorded node whether gradients stop there. Returns the names of the nodes that
    pass the gradient of their first argument straight through.
    """
    graph = functional.graph
    nodes = list(graph.nodes)
    recorded = [functional.sources.get(node, node) for node in nodes]
    unseen, zeroing = _operators_by_gradient(recorded)
    pairs = list(zip(nodes, recorded, strict=True))
    cut = {node for node, before in pairs if ran_without(before) or id(before.target) in unseen}
    zeroed = {
        node: _zeroed(node, before, functional.copied.get(node))
        for node, before in pairs
        if node in functional.copied or id(before.target) in zeroing
    }
    while nodes and nodes[-1] not in cut and nodes[-1] not in zeroed:
        nodes.pop()
    carrying: set[fx.Node | None] = set()
    detached: dict[fx.Node, fx.Node] = {}
    straight: list[str] = []
    for node in nodes:
        if node.op == "placeholder" or node not in cut or node in functional.looking:
            is_carrying = carries_gradient(node, carrying, open_inputs)
            if lost := [each for each in zeroed.get(node, ()) if each in carrying]:
                _choose_over(graph, node, lost)
                is_carrying = True
        else:
            before = functional.overwritten.get(node)
            is_carrying = before in carrying
            if before is not None and is_carrying:
                _refuse_used(functional.sources.get(node, node), before, carrying)
                _write_over(graph, node, before)
                straight.append(node.name)
            _detach_inputs(graph, node, carrying - {before}, detached)
        if is_carrying:
            carrying.add(node)
    return frozenset(straight)


def carries_gradient(
    node: fx.Node, carrying: Set[fx.Node | None], open_inputs: Collection[fx.Node] = ()
) -> bool:
    """Whether autograd follows the value of a node, where it follows those `carrying` among its sources.

    Each of `open_inputs` may need a gradient, whatever that of the example did.
    """
    value = node.meta.get("val")
    if node.op == "placeholder":
        return isinstance(value, Tensor) and (
            value.requires_grad or (node in open_inputs and value.is_floating_point())
        )
    if isinstance(value, SYMBOLIC) or getattr(node.target, "overloadpacket", None) in READS_NO_VALUE:
        return False
    return not carrying.isdisjoint(node.all_input_nodes)


def _refuse_used(writing: fx.Node, before: fx.Node, carrying: Set[fx.Node | None]) -> None:
    """Raise where autograd may have kept a tensor that has other data now: some of it is old then."""
    used = [user for user in before.users if user.target is not _DETACH]
    if PUTS_DATA in writing.meta and not carrying.isdisjoint(used):
        why = "it has been used, and what autograd kept of it may be its data of before, or of after"
        raise data_replaced(why, place_of(writing))


def _operators_by_gradient(nodes: Sequence[fx.Node]) -> tuple[Set[int], Set[int]]:
    """The operators that autograd does not look at, and those whose writes hand on zeros, by identity."""
    said = {key: said_of(target) for key, target in {id(node.target): node.target for node in nodes}.items()}
    unseen = {key for key, row in said.items() if row.is_unseen}
    return unseen, {key for key, row in said.items() if row.zeroes_gradient}


def _zeroed(node: fx.Node, recorded: fx.Node, copied: fx.Node | None) -> Sequence[fx.Node]:
    """What gets a gradient of zeros in a write, and none from the node that computes what is written."""
    if copied is not None:
        return (copied,)
    target: Any = recorded.target
    return node.all_input_nodes if node.target is functional_twin(target) else ()


def _detach_inputs(
    graph: fx.Graph, node: fx.Node, carrying: Set[fx.Node | None], detached: dict[fx.Node, fx.Node]
) -> None:
    for source in node.all_input_nodes:
        if source not in carrying:
            continue
        if source not in detached:
            with graph.inserting_before(node):
                made = graph.call_function(_DETACH, (source,))
            made.meta["val"] = source.meta["val"]
            set_origin(made, origin_of(node))
            detached[source] = made
        node.replace_input_with(source, detached[source])


def _choose_over(graph: fx.Graph, node: fx.Node, sources: Sequence[fx.Node]) -> None:
    """Let `node`, which computes what is written, give that with a gradient of zeros for its sources."""

    def made(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        new.meta["val"] = fake_result(target, args, kwargs)
        set_origin(new, origin_of(node))
        return new

    with graph.inserting_before(node):
        cut = {source: made(_DETACH, source) for source in sources}
        value = graph.node_copy(node, lambda source: cut.get(source, source))
        never = made(aten.new_zeros.default, value, [], dtype=torch.bool)
        for source in sources[1:]:
            value = made(aten.where.self, never, source, value)
    _become(node, aten.where.self, never, sources[0], value)


def _write_over(graph: fx.Graph, node: fx.Node, before: fx.Node) -> None:
    """Let `node`, which holds what was written, have the tensor that was overwritten as first argument."""
    if not node.args or node.args[0] is not before:
        with graph.inserting_before(node):
            value = graph.node_copy(node, lambda source: source)
        _become(node, aten.copy.default, before, value)


def _become(node: fx.Node, target: Any, *args: Any) -> None:
    node.target, node.args, node.kwargs = target, args, {}
    node.meta["val"] = fake_result(target, args, {})
