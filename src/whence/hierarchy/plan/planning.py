"""Make a plan: lay the program out, follow values across borders, put the steps of each body in order."""

import heapq
from collections.abc import Mapping
from typing import TypeVar

from whence.hierarchy.plan.borders import Borders, trace_borders
from whence.hierarchy.plan.equal_calls import CallPlans
from whence.hierarchy.plan.facts import PHASES, NodeLayout, Parts, layout_of, parts_of_layout
from whence.hierarchy.plan.plan import ROOT_CALL, Body, CallPlan, Flattened, Plan, Region
from whence.program import FlatProgram
from whence.schema import Phase

Part = TypeVar("Part", bound=str | int)


class CyclicError(ValueError):
    """Some parts wait for each other in a circle; `parts` are those on one."""

    def __init__(self, parts: frozenset[str | int]) -> None:
        super().__init__(f"parts wait for each other: {sorted(map(str, parts))}")
        self.parts = parts


def plan(program: FlatProgram, *, flat: bool = False) -> Plan:
    """The plan of a tree; with `flat`, of a single graph. Calls that cannot be cut out are flattened.

    Then none is shared: what is flattened depends on the calls around, and not on what a call computes.
    The same holds where calls are preserved: what they take is more than what they compute with.
    """
    flattened: dict[Region, str] = {}
    shares = not flat and not program.calls.preserved
    while True:
        layout = layout_of(program, flattened, flat=flat, shares=shares)
        parts = parts_of_layout(layout)
        borders = trace_borders(layout, parts)
        orders, circles = _orders(layout, parts, borders)
        if not circles:
            return _finished_plan(layout, borders, orders, flattened)
        flattened |= {} if shares else circles
        shares = False


def _orders(
    layout: NodeLayout, parts: Parts, borders: Borders
) -> tuple[dict[Region, tuple[str | int, ...]], dict[Region, str]]:
    rank = {phase: ranks(layout, parts, phase) for phase in PHASES}
    orders: dict[Region, tuple[str | int, ...]] = {}
    circles: dict[Region, str] = {}
    for region, waits in borders.waits.items():
        try:
            orders[region] = topological(waits, rank[region[0]])
        except CyclicError as error:
            circles |= _dissolved(layout, region[0], error)
    return orders, circles


def ranks(layout: NodeLayout, parts: Parts, phase: Phase) -> Mapping[str | int, int]:
    """The position of each step of a phase; for a call, that of the first step inside it."""
    found: dict[str | int, int] = {}
    for position, part in enumerate(parts.rows):
        home, call = part.region
        if home is phase:
            found[part.step] = position
        while home is phase and call != ROOT_CALL and call not in found:
            found[call] = position
            call = layout.parents[phase][call]
    if phase is Phase.FORWARD:
        for kept in layout.kept_calls:  # those that compute nothing run as soon as they can
            call = kept
            while call != ROOT_CALL and call not in found:
                found[call] = -1
                call = layout.parents[phase][call]
    return found


def _dissolved(layout: NodeLayout, phase: Phase, error: CyclicError) -> dict[Region, str]:
    """Flatten the calls on a circle; without a forward of its own a call can have no backward either."""
    calls = [part for part in error.parts if isinstance(part, int)]
    sites = ", ".join(map(layout.label, calls))
    reason = f"a value leaves {sites} in the {phase.value} and comes back before it has finished"
    phases = (Phase.FORWARD, Phase.BACKWARD) if phase is Phase.FORWARD else (phase,)
    return {(each, call): reason for each in phases for call in calls}


def _finished_plan(
    layout: NodeLayout,
    borders: Borders,
    orders: Mapping[Region, tuple[str | int, ...]],
    flattened: Mapping[Region, str],
) -> Plan:
    inlined = {layout.program.calls.entry, *(call for phase, call in flattened if phase is Phase.FORWARD)}
    inlined -= {ROOT_CALL}
    inlined |= {call for phase, call in flattened if call >= layout.numbering.count}
    planned = (n for n, copy in enumerate(layout.copies) if copy is None and n not in inlined)
    made = {number: _call_plan(layout, borders, orders, number) for number in planned}
    reasons = tuple(Flattened(call, phase, reason) for (phase, call), reason in flattened.items())
    return Plan(
        program=layout.program,
        calls=CallPlans(layout, made),
        flattened=reasons,
        regions=layout.regions,
        numbering=layout.numbering,
        first=layout.first,
        callers=layout.parents,
    )


def _call_plan(
    layout: NodeLayout, borders: Borders, orders: Mapping[Region, tuple[str | int, ...]], number: int
) -> CallPlan:
    forward, backward = (_planned_body(layout, borders, orders, (phase, number)) for phase in layout.parents)
    return CallPlan(number, forward, backward if layout.program.has_backward else None)


def _planned_body(
    layout: NodeLayout, borders: Borders, orders: Mapping[Region, tuple[str | int, ...]], region: Region
) -> Body:
    return Body(
        inputs=_root_inputs(layout, region[0])
        if region[1] == ROOT_CALL
        else tuple(borders.inputs.get(region, {})),
        outputs=tuple(borders.outputs.get(region, {})),
        reads=tuple(borders.reads.get(region, {}).items()),
        steps=orders.get(region, ()),
        kept=tuple(borders.kept.get(region[1], {})),
    )


def _root_inputs(layout: NodeLayout, phase: Phase) -> tuple[str, ...]:
    rows = [row.name for row in layout.program.signature.inputs]
    if phase is Phase.FORWARD:
        return tuple(name for name in rows if name in layout.users)
    return tuple(name for name in (*rows, layout.program.facts.seed) if name in layout.tangents)


def topological(waits: Mapping[Part, set[Part]], rank: Mapping[str | int, int]) -> tuple[Part, ...]:
    """The parts in order, the lowest rank first among those that are ready; raises `CyclicError`."""
    missing = {part: len(sources) for part, sources in waits.items()}
    followers: dict[Part, list[Part]] = {part: [] for part in waits}
    for part, sources in waits.items():
        for source in sources:
            followers[source].append(part)
    ready = [(rank[part], position, part) for position, part in enumerate(waits) if not missing[part]]
    heapq.heapify(ready)
    ordered: list[Part] = []
    while ready:
        _, _, part = heapq.heappop(ready)
        ordered.append(part)
        for follower in followers[part]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (rank[follower], len(ordered) + len(waits), follower))
    if len(ordered) < len(waits):
        raise CyclicError(_circle(waits, frozenset(ordered)))
    return tuple(ordered)


def _circle(waits: Mapping[Part, set[Part]], done: frozenset[Part]) -> frozenset[str | int]:
    """The parts of one circle, found by walking back along what is still waited for."""
    part = next(part for part in waits if part not in done)
    walked: list[Part] = []
    while part not in walked:
        walked.append(part)
        part = next(source for source in waits[part] if source not in done)
    return frozenset(walked[walked.index(part) :])
