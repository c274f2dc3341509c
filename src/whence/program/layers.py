"""The layers of a program: module calls that compute the same, with their nodes matched."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from whence.program.equality import Regions, first_equal_calls
from whence.program.node_records import origin_of
from whence.provenance import CallSite
from whence.schema import Phase

if TYPE_CHECKING:
    from whence.program.program import FlatProgram

_Enclosing = tuple[int, int] | None


@dataclass(frozen=True)
class Layers:
    """Calls of modules of one class that compute the same.

    `forward` and `backward` hold, for each of `calls` in order, the names of the nodes in it and in the calls
    inside it: node `k` of one call does what node `k` of every other does. What a checkpoint computes again
    is part of the backward.
    """

    type: str
    calls: tuple[CallSite, ...]
    forward: tuple[tuple[str, ...], ...]
    backward: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        sites = [str(self.calls[0]), str(self.calls[-1])]
        between = " … " if len(self) > 2 else ", "
        counts = {"forward": len(self.forward[0]), "backward": len(self.backward[0])}
        nodes = " + ".join(f"{count} {phase}" for phase, count in counts.items() if count)
        return f"{self.type} × {len(self)}: {between.join(sites)}, {nodes} nodes each"


def layers_of(program: "FlatProgram") -> tuple[Layers, ...]:
    """The groups of equal calls, in the order of their first calls.

    A group that follows from another one is left out: where 32 equal layers hold one attention each, these
    are equal, too. Where they hold two equal norms each, or a norm outside equals theirs, that is a group.
    """
    regions = Regions(program)
    groups = _equal_groups(first_equal_calls(regions))
    around = _enclosing_groups(program, groups)
    found = [calls for calls in groups.values() if not _follows([around[number] for number in calls])]
    return tuple(_layers_of(regions, calls) for calls in found if regions.inside(calls[0]))


def _equal_groups(first: Sequence[int]) -> dict[int, list[int]]:
    """All equal calls by the first of them, where there are two or more."""
    groups: dict[int, list[int]] = {}
    for number, leader in enumerate(first):
        groups.setdefault(leader, []).append(number)
    return {leader: calls for leader, calls in groups.items() if len(calls) > 1}


def _enclosing_groups(program: "FlatProgram", groups: Mapping[int, list[int]]) -> list[_Enclosing]:
    """For each call, the innermost call around it that equals others, and the first of these."""
    group_of = {number: leader for leader, calls in groups.items() for number in calls}
    around: list[_Enclosing] = [None]
    for call in program.calls:
        caller = call.parent
        around.append((caller, group_of[caller]) if caller in group_of else around[caller])
    return around


def _follows(around: Sequence[_Enclosing]) -> bool:
    """Whether each call is the only one of them in a call around it, and these are equal."""
    groups = {None if outer is None else outer[1] for outer in around}
    return None not in groups and len(groups) == 1 and len(set(around)) == len(around)


def _layers_of(regions: Regions, calls: Sequence[int]) -> Layers:
    inside = [regions.inside(number) for number in calls]
    sites = tuple(regions.rows[number].site for number in calls)
    return Layers(
        type=sites[0].type,
        calls=sites,
        forward=tuple(_names_in_phase(nodes, Phase.FORWARD) for nodes in inside),
        backward=tuple(_names_in_phase(nodes, Phase.BACKWARD) for nodes in inside),
    )


def _names_in_phase(nodes: Iterable[fx.Node], phase: Phase) -> tuple[str, ...]:
    return tuple(node.name for node in nodes if origin_of(node).phase is phase)
