"""Which operations a checkpoint runs again in the backward, beside the ones of the forward."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import fx

from whence.errors import Fault, UsageError
from whence.program import FlatProgram
from whence.program.node_records import origin_of
from whence.schema import Phase


def repeats_of(program: FlatProgram, names: Set[str]) -> Mapping[str, str]:
    """The operations that repeat some of these, by name, each with the one that it repeats.

    In a call they are of one operator, and in the same order: all of them, perhaps several times, or the
    first ones, where the backward needs no more. Raises `UsageError` naming those of which nobody can tell.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    again = _by_call(node for node in nodes if origin_of(node).recomputed)
    if not again:
        return {}
    before = _by_call(node for node in nodes if origin_of(node).phase is Phase.FORWARD)
    found, faults = dict[str, str](), list[Fault]()
    for calls, repeating in again.items():
        for first, later in _of_one_operator(before.get(calls, ()), repeating):
            if names.isdisjoint(first):
                continue
            is_told = len(later) % len(first) == 0 or _begins_like(before[calls], repeating)
            faults += [] if is_told else [_unclear(name) for name in first if name in names]
            found |= {name: of for at, name in enumerate(later) if (of := first[at % len(first)]) in names}
    UsageError.refuse(faults)
    return found


def _by_call(nodes: Iterable[fx.Node]) -> dict[Any, list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(origin_of(node).calls, []).append(node)
    return found


def _of_one_operator(
    first: Sequence[fx.Node], later: Sequence[fx.Node]
) -> Iterator[tuple[list[str], list[str]]]:
    """The names of both, for each operator that is in both."""
    for target in dict.fromkeys(node.target for node in later):
        names = [[node.name for node in nodes if node.target == target] for nodes in (first, later)]
        if names[0]:
            yield names[0], names[1]


def _begins_like(first: Sequence[fx.Node], later: Sequence[fx.Node]) -> bool:
    """Whether the operators that are in both come in one order, as far as the later ones go."""
    both = {node.target for node in first} & {node.target for node in later}
    begun, repeated = ([node.target for node in nodes if node.target in both] for nodes in (first, later))
    return begun[: len(repeated)] == repeated


def _unclear(name: str) -> Fault:
    return Fault(
        f"{name} cannot be patched: a checkpoint runs only some of the operations like it again",
        why="the backward would read what was there before wherever it is one of these",
        remedy="patch what comes before or after it, or capture without the checkpoint",
    )
