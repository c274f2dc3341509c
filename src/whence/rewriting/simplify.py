"""Compute less: nothing that nobody reads, and nothing twice."""

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import OpOverload, keeps_its_place
from whence._torch.sizes.symbols import has_open_sizes
from whence._torch.tensors import same_bits
from whence.program.node_records import origin_of
from whence.rewriting.splice import computed_of
from whence.rewriting.track import Edit


@dataclass(frozen=True)
class DeadCode:
    """Remove operations whose results nobody reads; those that draw random numbers or act stay."""

    name: str = "dead code"

    def rewrite(self, edit: Edit) -> None:
        """Remove them; inputs, the seed of the backward, and what autograd reads stay."""
        inputs, facts = {node.name for node in edit.graph.find_nodes(op="placeholder")}, edit.program.facts
        keep = inputs | facts.behind | {facts.seed or ""}
        drop_unused(edit.graph, edit.graph_module, frozenset(), keep)


@dataclass(frozen=True)
class CommonSubexpressions:
    """Compute once what is computed twice of the same values, forward and backward each for itself.

    With `across_phases` also what the backward repeats of the forward, as a checkpoint does, which then keeps
    the value instead. What is returned under two names stays two tensors. Numbers stay those of eager, but
    for gradients that autograd makes of a forward-only program: it adds up what arrives at one value before
    it goes on, which can be another last bit.
    """

    across_phases: bool = False
    name: str = "common subexpressions"

    def rewrite(self, edit: Edit) -> None:
        """Let everybody read the first of equal operations."""
        returned = set(edit.graph.output_node().all_input_nodes)
        first: dict[Hashable, fx.Node] = {}
        for node in list(edit.graph.nodes):
            if not _is_repeatable(node):
                continue
            phase = None if self.across_phases else origin_of(node).phase
            known = first.setdefault((phase, node.target, computed_of(node, lambda source: source)), node)
            if known is not node and not {known, node} <= returned:
                node.replace_all_uses_with(known)
                edit.graph.erase_node(node)


@dataclass(frozen=True)
class ConstantFolding:
    """Compute now what no input leads to, where it is one number everywhere: a single `aten.full` gives it.

    Other constants would be state that the model does not have. Up to `most` elements are computed.
    """

    most: int = 1_000_000
    name: str = "constant folding"

    def rewrite(self, edit: Edit) -> None:
        """Let everybody read the number; what led to it goes where nobody else reads it."""
        known: dict[fx.Node, Tensor] = {}
        for node in list(edit.graph.nodes):
            value = self._value(node, known)
            if value is not None:
                known[node] = value
        for node, value in known.items():
            is_read_outside = any(user not in known for user in node.users)
            if node.all_input_nodes and is_read_outside and (made := _filled(edit.graph, node, value)):
                edit.replaced(made, node)
                node.replace_all_uses_with(made)
        for node in reversed(known):
            if not node.users:
                edit.graph.erase_node(node)

    def _value(self, node: fx.Node, known: Mapping[fx.Node, Tensor]) -> Tensor | None:
        like = node.meta.get("val")
        if not (_is_repeatable(node) and isinstance(node.target, OpOverload) and isinstance(like, Tensor)):
            return None
        is_small = not has_open_sizes(like) and like.numel() <= self.most and like.device.type == "cpu"
        if not is_small or not all(source in known for source in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        with torch.no_grad():
            value: Tensor = node.target(*args, **kwargs)
        return value


def _filled(graph: fx.Graph, node: fx.Node, value: Tensor) -> fx.Node | None:
    """The node that makes the same tensor of one number; None for one of several."""
    if not value.numel() or not value.is_contiguous() or value.is_quantized:
        return None
    shape, number, place = list(value.shape), value.flatten()[0].item(), value.device
    if not same_bits(torch.full(shape, number, dtype=value.dtype, device=place), value):
        return None
    with graph.inserting_before(node):
        options: Any = {"dtype": value.dtype, "device": place}
        return graph.call_function(torch.ops.aten.full.default, (shape, number), options)


def _is_repeatable(node: fx.Node) -> bool:
    """Whether it gives the same whenever it is called: it draws nothing, and runs no graph."""
    if node.op != "call_function" or keeps_its_place(node.target, node.args, node.kwargs):
        return False
    if any(nested_graph(source) is not None for source in node.all_input_nodes):
        return False
    return isinstance(node.target, OpOverload) or not node.kwargs


def drop_unused(graph: fx.Graph, nested: nn.Module, repeated: Set[fx.Node], keep: Set[str]) -> None:
    """Remove operations whose results nothing reads, but for those called `keep`; those that draw or act
    stay, unless repeated. `nested` holds the graphs that nodes read."""
    erase(unused(graph, nested, repeated, keep))


def erase(nodes: Iterable[fx.Node]) -> None:
    """Remove nodes, each of which comes before what it reads."""
    for node in nodes:
        node.graph.erase_node(node)


def unused(graph: fx.Graph, nested: nn.Module, repeated: Set[fx.Node], keep: Set[str]) -> list[fx.Node]:
    """What `drop_unused` removes, the last first."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if node.op == "output" or node.name in keep or not all(user in found for user in node.users):
            continue
        if node in repeated or not _does_something(node, nested):
            found[node] = None
    return list(found)


def _does_something(node: fx.Node, nested: nn.Module) -> bool:
    """Whether a run is another one without the operation, although nobody reads its results."""
    if keeps_its_place(node.target, node.args, node.kwargs):
        return True
    read = (nested_graph(source, nested) for source in node.all_input_nodes)
    graphs = (inner for inner in read if inner is not None)
    return any(_does_something(part, inner) for inner in graphs for part in inner.graph.nodes)


def placeholders_of(graph: fx.Graph) -> dict[str, fx.Node]:
    return {node.name: node for node in graph.nodes if node.op == "placeholder"}


def order_placeholders(graph: fx.Graph, names: Sequence[str]) -> None:
    """Let a graph begin with its placeholders, in this order."""
    placeholders = placeholders_of(graph)
    first = next(iter(graph.nodes))
    if names and placeholders[names[0]] is not first:
        first.prepend(placeholders[names[0]])
    for earlier, later in pairwise(names):
        placeholders[earlier].append(placeholders[later])
