"""The graph of a bound program, in which an optimizer writes where its state lies, as in eager mode.

A program is functional: new values of state are computed beside the old ones, and copied over them at the
end. Where nobody reads an old value any more, and nothing can still say that the capture does not hold, the
operation that computes the new one runs in place: the same kernel, without the memory and without the copy.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from whence._torch.graphs import own_copy, with_code
from whence._torch.operators.schemas import in_place_twin, makes_memory, traits
from whence._torch.sizes.numbers import stays
from whence._torch.tensors import addresses, lie_apart
from whence.program import FlatProgram
from whence.program.node_records import origin_of
from whence.rewriting.functionalize import rounds_in_place
from whence.schema import InputKind, OutputKind, Phase


@dataclass(frozen=True)
class InPlace:
    """What runs a graph that writes some inputs in place.

    `written` are their names; outputs that are `placed` are there already when it has run.
    """

    run: Callable[..., Any]
    written: frozenset[str]
    placed: frozenset[str]


_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.OPTIMIZER_STATE)


class Placing:
    """Whether a bound step may write in place: what it writes must be the state itself, and lie apart."""

    def __init__(self, program: FlatProgram, module: fx.GraphModule) -> None:
        self._program = program
        self._module = module
        self._known: tuple[Any, bool] = None, False

    @cached_property
    def _graph(self) -> InPlace | None:
        """Made when a run first asks for it."""
        return None if self._program.step is None else in_place(self._program, own_copy(self._module))

    def graph(self, values: Mapping[str, Any], arguments: Sequence[Any]) -> InPlace | None:
        """The graph for these values, which it takes as `arguments`; None where it must not write to them."""
        if (found := self._graph) is None:
            return None
        given = [value for value in arguments if isinstance(value, Tensor)]
        key = addresses(given), addresses(values[name] for name in found.written)
        if None in key:
            return None
        if key != self._known[0]:
            names = (row.name for row in self._program.signature.inputs)
            self._known = key, _may_write(found.written, values, dict(zip(names, arguments, strict=True)))
        return found if self._known[1] else None


def _may_write(written: Set[str], values: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    if any(values[name].data_ptr() != arguments[name].data_ptr() for name in written):
        return False  # it is a copy, in another layout
    others = [value for name, value in arguments.items() if isinstance(value, Tensor) and name not in written]
    return lie_apart([arguments[name] for name in written], others)


def in_place(program: FlatProgram, module: fx.GraphModule) -> InPlace | None:
    """The graph of a step with operations in place, made of `module`; None where there are none."""
    state = {row.name for row in program.signature.inputs_of(*_STATE)}
    changed = program.signature.outputs_of(OutputKind.MUTATION)
    rows = {str(row.of): row for row in changed if row.of in state}
    graph = module.graph
    writing = _Placements(graph, frozenset(rows))
    for node in [node for node in graph.nodes if writing.is_candidate(node)]:
        writing.rewrite(node)
    if not writing.written:
        return None
    results: Any = graph.output_node().args[0]
    given = zip(program.signature.outputs, results, strict=True)
    placed = {row.name for row, value in given if rows.get(str(row.of)) is row and str(value) == row.of}
    module.recompile()
    return InPlace(with_code(module).forward, frozenset(writing.written), frozenset(placed))


class _Placements:
    """Operations of a graph that are put in place, one after the other."""

    def __init__(self, graph: fx.Graph, writable: Set[str]) -> None:
        self.graph = graph
        self.written: set[str] = set()
        self._writable = writable
        self._at = {node: number for number, node in enumerate(graph.nodes)}
        self._begin = max((at for node, at in self._at.items() if _decides(node)), default=-1)

    def is_candidate(self, node: fx.Node) -> bool:
        """Whether an operation is one of the optimizer's, after all that may still end the run."""
        return (
            self._at[node] > self._begin
            and node.op == "call_function"
            and origin_of(node).phase is Phase.OPTIMIZER
            and in_place_twin(node.target) is not None
        )

    def rewrite(self, node: fx.Node) -> None:
        """Put an operation in place, where all that it would write may be written."""
        twin: Any = in_place_twin(node.target)
        written = [node.args[position] for position in traits(twin).mutates if position < len(node.args)]
        if any(twin._schema.arguments[position].name in node.kwargs for position in traits(twin).mutates):
            return
        pairs = [*_written_results(node, written)]
        tensors = [tensor for tensor, _ in pairs]
        if rounds_in_place(node.target, tensors):
            return
        if not pairs or len({*tensors}) < len(tensors) or not all(self._fits(node, *pair) for pair in pairs):
            return
        roots = [_memory_owner(tensor) for tensor in tensors]
        if None in roots or len({*roots}) < len(roots):
            return
        if not all(self._may_be_written(root, node) for root in roots if root is not None):
            return
        self.written |= {root.name for root in roots if root is not None and root.op == "placeholder"}
        node.target = twin
        for tensor, result in pairs:
            if result is not None:
                result.replace_all_uses_with(tensor)
        for result in [*_parts_taken(node)]:
            self.graph.erase_node(result)

    def _fits(self, node: fx.Node, tensor: fx.Node, result: fx.Node | None) -> bool:
        """Whether a result lies as what would be written, which the operation reads nowhere else."""
        before, now = tensor.meta.get("val"), None if result is None else result.meta.get("val")
        is_alike = result is None or (
            isinstance(before, Tensor)
            and isinstance(now, Tensor)
            and _layout_facts(before) == _layout_facts(now)
        )
        return is_alike and _reads_of(node, tensor) == 1

    def _may_be_written(self, root: fx.Node, node: fx.Node) -> bool:
        """Whether memory is state that changes, or the graph's own, and nobody reads it afterwards."""
        if root.op == "placeholder" and root.name not in self._writable:
            return False
        return all(self._at[user] <= self._at[node] for user in _readers(root))


def _decides(node: fx.Node) -> bool:
    """Whether a node is there for what it says of the run: nobody reads an assertion."""
    return node.target is stays or (node.op == "call_function" and not node.users)


def _layout_facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


def _reads_of(node: fx.Node, tensor: fx.Node) -> int:
    """How often a node reads a tensor."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found.count(tensor)


def _written_results(node: fx.Node, written: Sequence[Any]) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """What is written, each with the node of its new value, if somebody reads that."""
    schema: Any = node.target
    several = len(schema._schema.returns) > 1
    for position, tensors in enumerate(written):
        parts = _by_position(node).get(position) if several else node
        if isinstance(tensors, fx.Node):
            yield tensors, parts
            continue
        items: Mapping[int, fx.Node] = {} if parts is None else _by_position(parts)
        for number, tensor in enumerate(tensors):
            yield tensor, items.get(number)


def _by_position(node: fx.Node) -> dict[int, fx.Node]:
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def _parts_taken(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that take results apart, the innermost first."""
    for user in list(node.users):
        if user.target is operator.getitem:
            yield from _parts_taken(user)
            yield user


def _memory_owner(node: fx.Node) -> fx.Node | None:
    """The node in whose memory a value lies: an input, or what an operator has made; None if not known."""
    if node.op == "placeholder" or makes_memory(_operation_of(node).target):
        return node
    at = traits(node.target).viewed
    source = None if at is None or at >= len(node.args) else node.args[at]
    return _memory_owner(source) if isinstance(source, fx.Node) else None


def _operation_of(node: fx.Node) -> fx.Node:
    """The operation of whose results a value is one."""
    return _operation_of(node.args[0]) if node.target is operator.getitem else node  # type: ignore[arg-type]


def _readers(root: fx.Node) -> Iterator[fx.Node]:
    """Who reads the memory of a value, by whatever view."""
    for user in root.users:
        yield user
        if user.op != "output" and not makes_memory(user.target):
            yield from _readers(user)
