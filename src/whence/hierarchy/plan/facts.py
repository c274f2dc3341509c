"""The facts a plan is made from: which call holds each node, which calls are equal, where state is held."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from torch import fx

from whence._torch.graphs import value_inputs
from whence.hierarchy.plan.plan import ROOT_CALL, Numbering, Region, first_within
from whence.program import FlatProgram
from whence.program.equality import Regions, first_equal_calls
from whence.program.node_records import origin_of
from whence.provenance import ModulePath
from whence.schema import InputKind, Phase

PHASES = (Phase.FORWARD, Phase.BACKWARD)


@dataclass(frozen=True)
class NodeLayout:
    """Where each node lives, and where the state is held.

    `first` gives for each call the first that equals it. `copies` gives the outermost call around it, or
    itself, that equals an earlier one; None for a call that is planned. `dissolved` are the calls whose
    operations are part of their caller's graph.
    """

    program: FlatProgram
    nodes: tuple[fx.Node, ...]
    regions: Mapping[str, Region]
    numbering: Numbering
    parents: Mapping[Phase, tuple[int, ...]]
    depths: Mapping[Phase, tuple[int, ...]]
    state_paths: Mapping[str, tuple[ModulePath, ...]]
    tangents: frozenset[str]
    users: frozenset[str]
    first: tuple[int, ...]
    copies: tuple[int | None, ...]
    dissolved: frozenset[int]

    @cached_property
    def kept_calls(self) -> list[int]:
        """The calls that are preserved and have a graph of their own."""
        return sorted(call for call in self.program.calls.preserved if call not in self.dissolved)

    @cached_property
    def inside(self) -> tuple[tuple[int, ...], ...]:
        """The calls made directly by each call."""
        return _calls_inside(self.parents[Phase.FORWARD])

    @cached_property
    def positions(self) -> dict[Region, list[int]]:
        """Where the nodes of each region stand."""
        found: dict[Region, list[int]] = {}
        for position, region in enumerate(self.regions.values()):
            found.setdefault(region, []).append(position)
        return found

    def nodes_in(self, call: int) -> list[fx.Node]:
        """The nodes of a call and of the calls inside it: first those of the forward, in order."""
        calls = [call]
        for number in calls:
            calls += self.inside[number]
        found = (sorted(chain(*(self.positions.get((p, n), ()) for n in calls))) for p in PHASES)
        return [self.nodes[position] for position in chain(*found)]

    def readable(self, name: str, call: int) -> ModulePath | None:
        """The attribute path by which the module of `call` reads a piece of state, if it holds it."""
        here = self.program.calls.rows[self.numbering.original(call)].site.path
        return first_within(self.state_paths[name], here)

    def label(self, call: int) -> str:
        """A call in words."""
        site = self.program.calls.rows[self.numbering.original(call)].site
        return str(site) if call < self.numbering.count else f"{site} (recomputed)"


def layout_of(
    program: FlatProgram, flattened: Mapping[Region, str], *, flat: bool, shares: bool
) -> NodeLayout:
    """The layout of a program, with the calls in `flattened`, or all of them, inlined.

    Without `shares` every call counts as one of its own.
    """
    held = Regions(program)
    placed = tuple(node for node in held.homes if node.name != program.facts.seed)
    repeated = {held.homes[node] for node in placed if origin_of(node).recomputed and not flat} - {ROOT_CALL}
    numbering = Numbering(len(program.calls.rows), tuple(sorted(repeated)))  # callers first
    parents = {phase: _callers(program, flattened, phase, numbering) for phase in PHASES}
    callers = parents[Phase.FORWARD]
    first = _first_equal(held, numbering, callers) if shares else tuple(range(len(callers)))
    tangents = {row.name for row in program.signature.inputs_of(InputKind.TANGENT)}

    def home(node: fx.Node) -> Region:
        origin, number = origin_of(node), held.homes[node]
        is_backward = origin.phase is Phase.BACKWARD and program.has_backward
        phase = Phase.BACKWARD if is_backward else Phase.FORWARD
        if flat or number == ROOT_CALL:
            return phase, ROOT_CALL
        number = numbering.repeat_of[number] if origin.recomputed else number
        stays = number != program.calls.entry and (phase, number) not in flattened
        return phase, number if stays else parents[phase][number]

    return NodeLayout(
        program=program,
        nodes=placed,
        regions={node.name: home(node) for node in placed},
        numbering=numbering,
        parents=parents,
        depths={phase: _depths(callers) for phase, callers in parents.items()},
        state_paths={row.name: row.attribute_paths for row in program.signature.state},
        tangents=frozenset(tangents | ({program.facts.seed} if program.facts.seed else set())),
        users=frozenset(row.name for row in program.signature.inputs_of(InputKind.USER)),
        first=first,
        copies=_copies_of_calls(callers, first),
        dissolved=frozenset(range(numbering.count) if flat else (call for _, call in flattened)),
    )


def _callers(
    program: FlatProgram, flattened: Mapping[Region, str], phase: Phase, numbering: Numbering
) -> tuple[int, ...]:
    """The call whose graph each call is a part of: its caller, unless that one is flattened or the root
    itself.

    A repeated call is a part of its caller's repetition, if there is one.
    """
    callers = list(program.calls.parents)
    callers += [_caller_of_repeat(callers, numbering.repeat_of, call) for call in numbering.repeats]
    inlined = {program.calls.entry} | {number for region, number in flattened if region is phase}
    return tuple(_nearest_graph(callers, number, inlined) for number in range(len(callers)))


def _nearest_graph(callers: Sequence[int], number: int, inlined: Set[int]) -> int:
    """The innermost caller that has a graph of its own."""
    caller = callers[number]
    while caller != ROOT_CALL and caller in inlined:
        caller = callers[caller]
    return caller


def _caller_of_repeat(callers: Sequence[int], repeat_of: Mapping[int, int], call: int) -> int:
    around = callers[call]
    while around != ROOT_CALL and around not in repeat_of:
        around = callers[around]
    return repeat_of.get(around, callers[call])


def _depths(parents: Sequence[int]) -> tuple[int, ...]:
    """How many calls are around each call; the root has none."""
    depths = [0]
    for caller in parents[1:]:
        depths.append(depths[caller] + 1)
    return tuple(depths)


def _first_equal(held: Regions, numbering: Numbering, callers: Sequence[int]) -> tuple[int, ...]:
    """For each call the first that equals it; the calls inside equal calls are equal, repeated ones too.

    Where a repetition belongs to another one than in the equal call, nothing is shared.
    """
    equal, inside = first_equal_calls(held), _calls_inside(callers)
    repeat_of, itself = numbering.repeat_of, tuple(range(len(callers)))
    if any(equal[call] not in repeat_of for call in numbering.repeats):
        return itself
    first = (*equal, *(repeat_of[equal[call]] for call in numbering.repeats))

    def matches(number: int, other: int) -> bool:
        difference = numbering.original(other) - numbering.original(number)
        found = [(numbering.original(n) + difference, n < numbering.count) for n in inside[number]]
        return found == [(numbering.original(n), n < numbering.count) for n in inside[other]]

    return first if all(map(matches, itself, first)) else itself


def _calls_inside(callers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    inside: list[list[int]] = [[] for _ in callers]
    for number, caller in enumerate(callers[1:], start=1):
        inside[caller].append(number)
    return tuple(map(tuple, inside))


def _copies_of_calls(callers: Sequence[int], first: Sequence[int]) -> tuple[int | None, ...]:
    copies: list[int | None] = [None]
    for number, caller in enumerate(callers[1:], start=1):
        own = number if first[number] != number else None
        copies.append(own if copies[caller] is None else copies[caller])
    return tuple(copies)


@dataclass
class BodyPart:
    """A step of a body as its caller sees it: an operation by name, or an equal call by number.

    `region` is the call in whose body it is a step. `needs` are the values it reads from other parts.
    """

    step: str | int
    region: Region
    needs: dict[str, None] = field(default_factory=dict)


@dataclass
class Parts:
    """All parts in order, the part that makes each value, and the equal calls that keep values for their
    backward."""

    layout: NodeLayout
    rows: list[BodyPart] = field(default_factory=list)
    makers: dict[str, BodyPart] = field(default_factory=dict)
    keeping: set[int] = field(default_factory=set)
    _copied: dict[Region, BodyPart] = field(default_factory=dict)

    def add(self, node: fx.Node) -> None:
        """Make a node a part, or a piece of the part that its call is."""
        phase, call = self.layout.regions[node.name]
        copy = self.layout.copies[call]
        names = [source.name for source in value_inputs(node)]
        if copy is None:
            part = BodyPart(node.name, (phase, call), dict.fromkeys(names))
            self.rows.append(part)
        else:
            part = self._copied.get((phase, copy)) or self._copy(phase, copy)
            makers = self.makers
            for name in names:
                if makers.get(name) is not part and not self._is_own_state(name, call, copy):
                    part.needs[name] = None
        self.makers[node.name] = part

    def keep_inside(self) -> None:
        """What an equal call has in its forward, it keeps for its backward: nobody brings it from outside."""
        for (phase, copy), part in self._copied.items():
            forward = self._copied.get((Phase.FORWARD, copy))
            if phase is Phase.FORWARD or forward is None:
                continue
            kept = [name for name in part.needs if self._has(forward, name)]
            for name in kept:
                del part.needs[name]
            self.keeping |= {copy} if kept else set()

    def _copy(self, phase: Phase, copy: int) -> BodyPart:
        part = self._copied[phase, copy] = BodyPart(copy, (phase, self.layout.parents[phase][copy]))
        self.rows.append(part)
        return part

    def _is_own_state(self, name: str, call: int, copy: int) -> bool:
        """Whether a call between the one that reads a value and the copy around it holds it as state."""
        if name not in self.layout.state_paths:
            return False
        while self.layout.readable(name, call) is None:
            if call == copy:
                return False
            call = self.layout.parents[Phase.FORWARD][call]
        return True

    def _has(self, forward: BodyPart, name: str) -> bool:
        if name in self.layout.state_paths:
            return False
        return name in forward.needs or self.makers.get(name) is forward


def parts_of_layout(layout: NodeLayout) -> Parts:
    parts = Parts(layout)
    for node in layout.nodes:
        parts.add(node)
    parts.keep_inside()
    return parts
