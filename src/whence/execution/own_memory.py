"""New values and gradients of a run, each in memory of its own: what is written must not change another."""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import makes_memory
from whence._torch.tensors import storage_of
from whence.program import FlatProgram
from whence.program.signature import Output
from whence.schema import OutputKind

_HANDED_OUT = (OutputKind.USER, OutputKind.EFFECT)
_PUT = (OutputKind.MUTATION, OutputKind.GRADIENT)


def certainly_own(program: FlatProgram) -> frozenset[str]:
    """The outputs whose memory is nobody else's, as the graph says: the others are looked at in every run.

    A new value is copied from there; a gradient is kept, and must not be seen through anything else.
    """
    results: Any = program.graph.output_node().args[0]
    shown = Counter(node for node in results if isinstance(node, fx.Node))
    nodes = {node.name: node for node in shown}
    rows = [(row, nodes.get(str(row.node))) for row in program.signature.outputs if row.kind in _PUT]
    return frozenset(
        row.name
        for row, node in rows
        if node is not None
        and _is_fresh(node)
        and (row.kind is OutputKind.MUTATION or (shown[node] == 1 and _is_seen_through_nothing(node)))
    )


def _is_fresh(node: fx.Node) -> bool:
    """Whether a value lies in memory that the operator has made for it."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_fresh(source)
    return makes_memory(node.target)


def _is_seen_through_nothing(node: fx.Node) -> bool:
    return all(user.op == "output" or makes_memory(user.target) for user in node.users)


def in_own_memory(
    rows: Sequence[tuple[Output, Any]], values: Mapping[str, Any], own: Set[str]
) -> dict[str, Any]:
    """New values and gradients by the names of outputs; those that are not certainly their `own` are looked
    at, and cloned where others look into their memory."""
    put = [(row, value) for row, value in rows if row.kind in _PUT and isinstance(value, Tensor)]
    if all(row.name in own for row, _ in put):
        return {row.name: value for row, value in put}
    taken = _memories(values.values())
    taken |= _memories(value for row, value in rows if row.kind in _HANDED_OUT)
    found: dict[str, Any] = {}
    for row, value in put:
        found[row.name] = value.clone() if _memory(value) in taken else value
        if row.kind is OutputKind.GRADIENT:
            taken.add(_memory(found[row.name]))
    return found


def _memories(values: Iterable[Any]) -> set[int]:
    return {_memory(value) for value in values if isinstance(value, Tensor)}


def _memory(value: Tensor) -> int:
    """The memory that a tensor looks into; a sparse one shares none."""
    return storage_of(value) if value.layout is torch.strided else id(value)
