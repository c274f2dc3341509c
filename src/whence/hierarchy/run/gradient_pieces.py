"""Gradients as the pieces that arrived for them.

Autograd adds what arrives for a tensor in the order of its arrival. A module that took another's place may
hand on several pieces, and what arrived for its result, too, where it returns what it was given. So where
others took the places of preserved calls, the captured backward adds such gradients when they are complete.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from whence.hierarchy.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Piece:
    """A gradient that arrived for a tensor: when the node `at` this position of the captured graph ran."""

    tensor: Tensor
    at: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """What arrived for a tensor."""

    parts: tuple[Piece, ...]


def pieces_in(gradient: Any, at: int) -> tuple[Piece, ...]:
    """What a gradient is the sum of; one that is in one piece arrived then."""
    return gradient.parts if isinstance(gradient, Pieces) else (Piece(gradient, at),)


def joined(first: Any, first_at: int, second: Any, second_at: int) -> Pieces:
    """What arrived for a tensor, in two portions."""
    return Pieces((*pieces_in(first, first_at), *pieces_in(second, second_at)))


def in_order(parts: Iterable[Piece]) -> tuple[Tensor, ...]:
    """The tensors in the order in which eager hands them on."""
    return tuple(part.tensor for part in sorted(parts, key=attrgetter("at")))


def added(parts: Iterable[Tensor]) -> Tensor | None:
    """The sum, one part after the other; None where there is none."""
    return functools.reduce(torch.add, parts) if (parts := tuple(parts)) else None


def whole(gradient: Any) -> Any:
    """The sum of pieces; anything else as it is."""
    return added(in_order(gradient.parts)) if isinstance(gradient, Pieces) else gradient


@dataclass(frozen=True)
class GradientPieces:
    """The gradients of a program that a backward keeps in pieces.

    `nodes` hold a piece or a sum of pieces. `sums` gives for each node that is a sum what it adds up: the sum
    before it, or the first piece, and the piece that arrived.
    """

    nodes: frozenset[str]
    sums: Mapping[str, tuple[str, str]]


def pieces_of(plan: Plan) -> GradientPieces:
    """The gradients of what preserved calls, and those in them, take and give, and of all state."""
    sums: dict[str, tuple[str, str]] = {}
    nodes: set[str] = set()
    for name in _exchanged(plan):
        held = ""
        for part in plan.program.facts.contributions(name):
            if part.sum is not None and {held, part.node} == _added(plan, part.sum):
                sums[part.sum] = held, part.node
            held = part.sum or part.node
            nodes |= {part.node, held}
    return GradientPieces(frozenset(nodes), sums)


def _exchanged(plan: Plan) -> Iterator[str]:
    program = plan.program
    calls = {call for number in program.calls.preserved for call in program.calls.within(number)}
    for row in (program.calls.rows[number] for number in sorted(calls)):
        for structure in filter(None, (row.inputs, row.outputs)):
            yield from structure.names
    yield from (row.name for row in program.signature.state)


def _added(plan: Plan, name: str) -> set[str]:
    node = plan.nodes[name]
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return set()
    return {source.name for source in node.all_input_nodes}
