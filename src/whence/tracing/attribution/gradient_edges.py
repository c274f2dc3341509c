"""Follow gradients from one of autograd's nodes to the next.

What is recorded between two of them are sums: one for each outgoing edge, in order, whose target already
holds a gradient.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, fx

from whence._torch.autograd.nodes import GradientKey
from whence._torch.record.recorder import Recorder
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.provenance.places import PROGRAM, accumulation_place
from whence.schema import Phase
from whence.tracing.log.log import Log


class Arrival(NamedTuple):
    """A gradient that reached a value: who brought it, the sum it became part of, and when.

    `scopes` are the calls it came from, several if it is a sum of what they brought. `at` is how many nodes
    had been recorded before the sum, or would have been, and `turn` how many gradients had reached a value.
    """

    node: fx.Node
    scopes: tuple[int, ...]
    sum: fx.Node | None
    at: int
    turn: int


@dataclass(frozen=True, slots=True)
class Sum:
    """A recorded addition of gradients: where it belongs, the scopes that contributed, and what it is for."""

    place: int
    contributors: tuple[int, ...]
    key: GradientKey


@dataclass
class GradientSums:
    """Gradients as they arrived, value by value, and the sums they made."""

    arrivals: dict[GradientKey, list[Arrival]] = field(default_factory=dict)
    sums: dict[fx.Node, Sum] = field(default_factory=dict)
    delivered: int = 0

    @cached_property
    def sum_of(self) -> dict[fx.Node, fx.Node | None]:
        """The sum that each gradient became part of, once all have arrived."""
        return {arrival.node: arrival.sum for held in self.arrivals.values() for arrival in held}


def follow(log: Log, roots: Sequence[tuple[GradientKey | None, fx.Node]], start: int) -> GradientSums:
    """Replay what autograd handed from node to node, and find the sums among the recorded operations.

    `roots` are the gradients it was given, and what is recorded from `start` on came of them.
    """
    gradients = GradientSums()
    producers = _Producers(log)
    first = log.steps[0].start if log.steps else len(log.order)
    given = [(key, tangent, (PROGRAM,)) for key, tangent in roots]
    _deliver(gradients, producers, given, _unclaimed(log, start, first), start)
    for step, following in zip_longest(log.steps, log.steps[1:]):
        scopes = step.scopes or repeat((log.scope_of(step.node),))
        end = len(log.order) if following is None else following.start
        edges = zip(step.keys, step.produced, scopes, strict=False)
        _deliver(gradients, producers, edges, _unclaimed(log, step.end, end), step.end)
    return gradients


def _unclaimed(log: Log, start: int, end: int) -> Iterator[fx.Node]:
    """What was recorded between two autograd nodes, but for what hooks computed and what went into `.grad`:
    sums."""
    between = (node for node in log.order[start:end] if log.marks[node].phase is Phase.BACKWARD)
    return (node for node in between if log.marks[node].hook is None and node not in log.kept)


class _Producers:
    """The scope that made the value a gradient is for."""

    def __init__(self, log: Log) -> None:
        self.parents = log.parents
        self._scopes = {id(step.node): log.scope_of(step.node) for step in log.steps}

    def scope(self, key: GradientKey) -> int:
        """The program itself for leaves."""
        identity, index, *_ = key
        return PROGRAM if index < 0 else self._scopes.get(identity, PROGRAM)


def _deliver(
    gradients: GradientSums,
    producers: _Producers,
    edges: Iterable[tuple[GradientKey | None, fx.Node | None, tuple[int, ...]]],
    sums: Iterator[fx.Node],
    at: int,
) -> None:
    for key, node, scopes in edges:
        if key is None or node is None:
            continue
        held = gradients.arrivals.setdefault(key, [])
        total = next(sums, None) if held else None
        held.append(Arrival(node, scopes, total, at, gradients.delivered))
        gradients.delivered += 1
        if total is not None:
            at += 1
            contributors = tuple(scope for arrival in held for scope in arrival.scopes)
            place = accumulation_place(producers.parents, contributors, producers.scope(key))
            gradients.sums[total] = Sum(place, contributors, key)


def as_own_nodes(
    recorder: Recorder,
    log: Log,
    keys: Sequence[GradientKey | None],
    start: int,
    produced: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:
    """What an autograd node hands on to the places `keys`; `start` is where its operations begin.

    Another module may take the place of a preserved call. What it hands to what is around it is its own then,
    and it may return what it was given: so a gradient that is handed on as it came, to a value that modules
    exchange or to a leaf, gets a node that does nothing, made when it arrives.
    """
    new, edges = set(log.order[start:]), zip(keys, produced, strict=True)
    return [
        _own(recorder, gradient, new) if _is_told_apart(log, key) else gradient for key, gradient in edges
    ]


def _is_told_apart(log: Log, key: GradientKey | None) -> bool:
    return key is not None and (key in log.exchanged or key[1] < 0)


def _own(recorder: Recorder, gradient: Tensor | None, new: set[fx.Node]) -> Tensor | None:
    """A gradient as a node that nothing else stands for: each of the `new` ones is taken once."""
    if gradient is None or is_composed(gradient) or (made := recorder.node_of(gradient)) is None:
        return gradient
    if made not in new:
        again: Tensor = torch.ops.aten.alias.default(gradient)
        return again
    new.remove(made)
    return gradient
