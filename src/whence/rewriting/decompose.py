"""Lower operators to what they are made of: a composite as eager takes it apart, others by a table."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.export import default_decompositions

from whence._torch.autograd.mode_questions import GRAD
from whence._torch.graphs import nested_graph
from whence._torch.operators.decompositions import FAILS, Operation, Table, decomposition_of
from whence._torch.operators.schemas import (
    MAY_COPY,
    OpOverload,
    draws,
    is_composite,
    keeps_its_place,
    op_name,
    overloads_of,
)
from whence._torch.pytrees import tree_flatten
from whence._torch.record.annotations import CUSTOM
from whence._torch.sizes.numbers import RecordedNumber, Unknown
from whence._torch.sizes.symbols import comparable, is_symbolic
from whence.errors import Fault, Noting, UnsupportedOperator, UsageError
from whence.program.node_records import RECORD, GraphFacts, place_of
from whence.rewriting.cut_gradients import carries_gradient
from whence.rewriting.edits.before import MARK
from whence.rewriting.functionalize import functionalize
from whence.rewriting.splice import Splice, UnknownValueError, called_again, replace_by
from whence.rewriting.track import Edit

_DETACH = torch.ops.aten.detach.default
Wanted = Literal["core"] | Mapping[Any, Callable[..., Any]] | None


@dataclass(frozen=True)
class Decompose:
    """Take operators apart.

    Without a table those go that PyTorch itself writes in terms of others (`linear`, `matmul`, `layer_norm`,
    `scaled_dot_product_attention`, …), each as eager takes it apart in the grad mode of this moment; the
    program then holds for that mode alone, as a joint one does. `"core"` is PyTorch's table for its core ATen
    operators (`torch.export.default_decompositions()`), which computes other last bits. A table of one's own
    gives functions by operator, all overloads of it or one; functions that return `NotImplemented` leave it.
    What hands gradients straight through (`NodeRecord.is_straight_through`) stays whole.
    """

    table: Wanted = None
    name: str = field(default="decompose")

    def rewrite(self, edit: Edit) -> None:
        """Raises `UnsupportedOperator`, naming every operator that cannot be written with others."""
        rules, faults, program = rules_of(self.table), list[Fault](), edit.program
        for graph in graphs_in(edit.graph):
            carrying = frozenset[fx.Node]() if program.has_backward else _carrying(graph)
            facts = program.facts if graph is edit.graph else GraphFacts()
            straight = facts.straight_through
            chosen = [node for node in graph.nodes if rules.concern(node) and node.name not in straight]
            faults += _lowered(graph, chosen, rules, GradientsSeen(carrying, facts.turned_on))
        UnsupportedOperator.refuse(faults)
        if not (program.has_backward or rules.is_own):
            edit.program = program.with_changes(guards=program.guards.in_mode_of_now(GRAD))


@dataclass(frozen=True)
class Rules:
    """What takes operators apart: a table, or eager mode. One's own must fit; another's is left where it does
    not, as PyTorch's is for attention that a backward follows."""

    table: Table | None
    is_own: bool = False

    def concern(self, node: fx.Node) -> bool:
        """Whether they say what a node is made of."""
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            return False
        if self.is_own:
            return node.target in self.table  # type: ignore[operator]
        if self.table is not None and node.target in self.table:
            return not draws(node.target, node.args, node.kwargs) and _has_static_numbers(node)
        return is_composite(node.target) and not (node.target in MAY_COPY and _has_open_sizes(node))

    def function(self, target: Any) -> Callable[..., Any]:
        """What computes the same in terms of others."""
        return target if self.table is None else self.table.get(target, target)


def rules_of(wanted: Wanted) -> Rules:
    """The rules that were asked for; raises `UsageError`."""
    if wanted is None:
        return Rules(None)
    if wanted == "core":
        return Rules(dict(default_decompositions()))
    if not isinstance(wanted, Mapping):
        raise UsageError(
            f"{wanted!r} is no table of decompositions",
            remedy='give None, "core", or a mapping from operators to functions',
        )
    return Rules(dict(row for key, function in wanted.items() for row in _overloads(key, function)), True)


def _overloads(key: object, function: Callable[..., Any]) -> Iterator[tuple[Any, Callable[..., Any]]]:
    found = overloads_of(key)
    if not found or not callable(function):
        raise UsageError(
            f"{key!r}: {function!r} is no decomposition",
            remedy="give functions by operators, such as {torch.ops.aten.gelu.default: function}",
        )
    yield from ((overload, function) for overload in found)


def graphs_in(graph: fx.Graph) -> Iterator[fx.Graph]:
    """A graph, and those that its branches and loops run."""
    yield graph
    for node in graph.find_nodes(op="get_attr"):
        if (inner := nested_graph(node)) is not None:
            yield from graphs_in(inner.graph)


@dataclass(frozen=True)
class GradientsSeen:
    """What autograd would see of a forward: which values carry a gradient, and where it is on in any case."""

    carrying: Set[fx.Node]
    turned_on: Set[str]

    def records(self, node: fx.Node) -> bool:
        """Whether autograd looks at what a node does."""
        return bool(self.carrying) and (torch.is_grad_enabled() or node.name in self.turned_on)


def _lowered(
    graph: fx.Graph, nodes: Sequence[fx.Node], rules: Rules, differentiated: GradientsSeen
) -> Iterator[Fault]:
    made: list[fx.Node] = []
    for node in nodes:
        try:
            made += _decomposed(node, rules, differentiated)
        except UnknownValueError as unknown:
            yield Fault(
                f"{op_name(node.target)} ({node.name}) cannot be taken apart",
                where=place_of(node),
                why=str(unknown),
                remedy="leave it out of the table",
            )
    functional = functionalize(graph)
    output = graph.output_node()
    output.args = fx.map_arg(output.args, functional.value_of)
    present = set(graph.nodes)
    for node in reversed([*made, *functional.sources, *functional.replaced]):
        is_needed = node.users or keeps_its_place(node.target, node.args, node.kwargs)
        if node in present and not is_needed:
            graph.erase_node(node)
            present.discard(node)


def _carrying(graph: fx.Graph) -> frozenset[fx.Node]:
    """The values that have a gradient in eager mode."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is not _DETACH and carries_gradient(node, found):
            found.add(node)
    return frozenset(found)


def _has_static_numbers(node: fx.Node) -> bool:
    """Whether no argument is a number that only a run has, such as the learning rate of a step."""
    values = (source.meta.get("val") for source in node.all_input_nodes)
    return not any(isinstance(value, RecordedNumber | Unknown) for value in values)


def _has_open_sizes(node: fx.Node) -> bool:
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return any(is_symbolic(size) for value in values if isinstance(value, Tensor) for size in value.shape)


def _decomposed(node: fx.Node, rules: Rules, differentiated: GradientsSeen) -> list[fx.Node]:
    """Write what a node is made of in its place; the nodes that were written."""
    values = {
        source: _fresh(source, carries=source in differentiated.carrying) for source in node.all_input_nodes
    }
    operations, result = _operations(node, rules, values, records=differentiated.records(node))
    if result is NotImplemented or [each.target for each in operations] == [node.target]:
        return []
    if (found := _looks(result)) != (wanted := _looks(node.meta["val"])):
        if rules.is_own:
            raise UnknownValueError(f"its decomposition gives {found}, not {wanted}")
        return []
    made: list[fx.Node] = []

    def inherit(new: fx.Node) -> None:
        new.meta |= {key: node.meta[key] for key in (MARK, CUSTOM, RECORD) if key in node.meta}
        made.append(new)

    splice = Splice(node, values, inherit)
    for operation in operations:
        splice.add(operation)
    replace_by(node, splice.known(result))
    return made


def _operations(
    node: fx.Node, rules: Rules, values: Mapping[fx.Node, Any], *, records: bool
) -> tuple[list[Operation], Any]:
    call = partial(called_again, node, rules.function(node.target), values)
    fakes, _ = tree_flatten(node.meta["val"])
    what = f"{op_name(node.target)} ({node.name}), {place_of(node)}"
    said = Noting(f"whence was taking apart {what}; the program is as before")
    with said, torch.set_grad_enabled(records):
        try:
            return decomposition_of(call, fakes, table=rules.table, running=(node.target,))
        except FAILS as error:
            raise UnknownValueError(f"its decomposition raises {type(error).__name__}: {error}") from error


def _fresh(source: fx.Node, *, carries: bool) -> Any:
    """A value of its own, so that it can be told apart."""
    value = source.meta["val"]
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        fresh = value.detach()
    return fresh.requires_grad_(carries and (fresh.is_floating_point() or fresh.is_complex()))


def _looks(value: Any) -> Any:
    """Shapes and dtypes of results."""
    if isinstance(value, (tuple, list)):
        return [_looks(item) for item in value]
    return (comparable(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)
