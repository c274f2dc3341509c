"""Decide which call holds which node, what crosses its borders, and in which order its parts run.

A plan is data: it can be checked, printed and emitted, and nothing in it changes once it is made. Calls are
numbers (their order in the program), values are names of graph nodes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from whence.hierarchy.order import CyclicError, topological
from whence.program import Input, Program
from whence.program.origins import origin_of
from whence.provenance import CallSite, ModulePath
from whence.schema import InputKind, Phase

ROOT_CALL = 0
NOT_PLACED = frozenset({"placeholder", "output", "get_attr"})
Region = tuple[Phase, int]


@dataclass(frozen=True)
class Body:
    """What one call computes in one phase.

    `inputs` and `outputs` are the values that cross its border, `reads` the state it takes from its own
    module (name of the input and attribute path from the module). `steps` are its own nodes (by name) and
    the calls inside it (by number), in the order they run. `kept` are values of the forward that its
    backward needs.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[tuple[str, ModulePath], ...]
    steps: tuple[str | int, ...]
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallPlan:
    """One call: its forward and, in a program with a backward pass, its backward."""

    number: int
    forward: Body
    backward: Body | None


@dataclass(frozen=True)
class Flattened:
    """A call whose operations stay in its caller's graph, and why."""

    number: int
    phase: Phase
    reason: str


@dataclass(frozen=True)
class Plan:
    """Every call that gets a graph of its own, by number; `nodes` are the operations the plan places.

    What a checkpoint computes again in the backward is a call of its own there: it runs before the backward
    that asked for it. Such calls are numbered after those of the program, and `repeats` gives the call each
    repeats.
    """

    program: Program
    calls: Mapping[int, CallPlan]
    flattened: tuple[Flattened, ...]
    regions: Mapping[str, Region]
    repeats: tuple[int, ...] = ()

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """The nodes of the program by name."""
        return {node.name: node for node in self.program.graph.nodes}

    def original(self, number: int) -> int:
        """The call of the program that a call of the plan is, or repeats."""
        count = len(self.program.calls.rows)
        return number if number < count else self.repeats[number - count]

    def site(self, number: int) -> CallSite:
        """The call site of a call of the plan."""
        return self.program.calls.rows[self.original(number)].site

    def body(self, phase: Phase, number: int) -> Body:
        """What a call computes in a phase; nothing, where the program has no backward."""
        call = self.calls[number]
        backward = call.backward or Body((), (), (), ())
        return call.forward if phase is Phase.FORWARD else backward


@dataclass
class Borders:
    """What crosses the borders of each region, and which parts of it wait for which."""

    inputs: dict[Region, dict[str, None]] = field(default_factory=dict)
    outputs: dict[Region, dict[str, None]] = field(default_factory=dict)
    reads: dict[Region, dict[str, ModulePath]] = field(default_factory=dict)
    kept: dict[int, dict[str, None]] = field(default_factory=dict)
    waits: dict[Region, dict[str | int, set[str | int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """The facts a plan is made from: where each node lives, and where the state is held."""

    program: Program
    nodes: tuple[fx.Node, ...]
    regions: Mapping[str, Region]
    parents: Mapping[Phase, tuple[int, ...]]
    depths: Mapping[Phase, tuple[int, ...]]
    state_paths: Mapping[str, tuple[ModulePath, ...]]
    tangents: frozenset[str]
    users: frozenset[str]
    repeats: tuple[int, ...]

    def readable(self, name: str, call: int) -> ModulePath | None:
        """The attribute path by which the module of `call` reads a piece of state, if it holds it."""
        count = len(self.program.calls.rows)
        here = self.program.calls.rows[call if call < count else self.repeats[call - count]].site.path
        return first_within(self.state_paths[name], here)

    def label(self, call: int) -> str:
        """A call in words."""
        count = len(self.program.calls.rows)
        if call < count:
            return str(self.program.calls.rows[call].site)
        return f"{self.program.calls.rows[self.repeats[call - count]].site} (recomputed)"


def plan(program: Program, *, flat: bool = False) -> Plan:
    """The plan of a tree; with `flat`, of a single graph. Calls that cannot be cut out are flattened."""
    flattened: dict[Region, str] = {}
    while True:
        layout = _layout(program, flattened, flat=flat)
        borders = trace_borders(layout)
        rank = {phase: ranks(layout, phase) for phase in layout.parents}
        orders: dict[Region, tuple[str | int, ...]] = {}
        circles: dict[Region, str] = {}
        for region, waits in borders.waits.items():
            try:
                orders[region] = topological(waits, rank[region[0]])
            except CyclicError as error:
                circles |= _dissolved(layout, region[0], error)
        if not circles:
            return _finished(layout, borders, orders, flattened)
        flattened |= circles


def _layout(program: Program, flattened: Mapping[Region, str], *, flat: bool) -> Layout:
    placed = tuple(n for n in program.graph.nodes if n.op not in NOT_PLACED and n.name != program.seed)
    numbers = {(call.site.path, call.site.index): call.number for call in program.calls}
    repeats = () if flat else _repeated(placed, numbers)
    repeat_of = {call: len(program.calls.rows) + position for position, call in enumerate(repeats)}
    parents = {
        phase: _callers(program, flattened, phase, repeats) for phase in (Phase.FORWARD, Phase.BACKWARD)
    }

    def home(node: fx.Node) -> Region:
        origin = origin_of(node)
        phase = Phase.BACKWARD if origin.phase is Phase.BACKWARD else Phase.FORWARD
        if flat or origin.place is None:
            return phase, ROOT_CALL
        number = numbers[origin.place.path, origin.place.index]
        number = repeat_of[number] if origin.recomputed else number
        stays = number != program.entry and (phase, number) not in flattened
        return phase, number if stays else parents[phase][number]

    tangents = {row.name for row in program.signature.inputs_of(InputKind.TANGENT)}
    return Layout(
        program=program,
        nodes=placed,
        regions={node.name: home(node) for node in placed},
        parents=parents,
        depths={phase: _depths(callers) for phase, callers in parents.items()},
        state_paths={row.name: paths_of_state(row) for row in program.signature.state},
        tangents=frozenset(tangents | ({program.seed} if program.seed else set())),
        users=frozenset(row.name for row in program.signature.inputs_of(InputKind.USER)),
        repeats=repeats,
    )


def _repeated(nodes: Iterable[fx.Node], numbers: Mapping[tuple[ModulePath, int], int]) -> tuple[int, ...]:
    """The calls that a checkpoint runs again, callers first."""
    places = (origin.place for node in nodes if (origin := origin_of(node)).recomputed)
    return tuple(sorted({numbers[place.path, place.index] for place in places if place is not None}))


def _callers(
    program: Program, flattened: Mapping[Region, str], phase: Phase, repeats: tuple[int, ...]
) -> tuple[int, ...]:
    """The call whose graph each call is a part of: its caller, unless that one is flattened or the root
    itself.

    A repeated call is a part of its caller's repetition, if there is one.
    """
    callers = list(program.calls.parents)
    repeat_of = {call: len(callers) + position for position, call in enumerate(repeats)}
    callers += [_caller_of_repeat(callers, repeat_of, call) for call in repeats]
    inlined = {program.entry} | {number for region, number in flattened if region is phase}
    return tuple(_nearest(callers, number, inlined) for number in range(len(callers)))


def _nearest(callers: Sequence[int], number: int, inlined: Set[int]) -> int:
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


def paths_of_state(row: Input) -> tuple[ModulePath, ...]:
    """Every attribute path of a piece of state."""
    return tuple(map(ModulePath.parse, (row.path, *row.aliases)))


def first_within(paths: Iterable[ModulePath], here: ModulePath) -> ModulePath | None:
    """The first of `paths` that lies within the module `here`, from there on."""
    return next((path.relative_to(here) for path in paths if path.is_within(here)), None)


def _depths(parents: Sequence[int]) -> tuple[int, ...]:
    def depth(call: int) -> int:
        steps = 0
        while call != ROOT_CALL:
            call, steps = parents[call], steps + 1
        return steps

    return tuple(map(depth, range(len(parents))))


def pack_of(call: int) -> str:
    """The name of the value that carries what a call keeps for its backward; no node can have such a name."""
    return f"kept@{call}"


def pack_label(name: str, spelled: Callable[[int], str]) -> str:
    """How a value is shown: itself, or `kept_` and the call it is a pack of."""
    before, _, number = name.partition("@")
    return f"{before}_{spelled(int(number))}" if number else name


def trace_borders(layout: Layout) -> Borders:
    """Follow every value from where it is made to every place it is used, forward uses first."""
    borders = Borders()
    router = _Router(layout, borders)
    for node in layout.nodes:
        router.place(node)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        _trace_uses(layout, router, phase)
    _trace_results(layout, borders, router)
    for call in reversed(layout.program.calls.rows[1:]):
        if borders.kept.get(call.number):
            router.pack(call.number)
    return borders


def _trace_uses(layout: Layout, router: "_Router", phase: Phase) -> None:
    for node in layout.nodes:
        region = layout.regions[node.name]
        if region[0] is phase:
            for source in node.all_input_nodes:
                router.use(source.name, node.name, region)


def _trace_results(layout: Layout, borders: Borders, router: "_Router") -> None:
    """What the program returns, the values its state goes through, and what each call returns."""
    returned = [row.node for row in layout.program.signature.outputs if row.node is not None]
    histories = layout.program.histories.values()
    for value in (*returned, *(value for history in histories for value in history)):
        router.give_back(value)
    for call in layout.program.calls:
        if call.outputs is not None and (Phase.FORWARD, call.number) in borders.waits:
            taken = call.inputs.names if call.inputs is not None else ()
            written = (value for name in taken for value in layout.program.written.get(name, ()))
            for value in (*call.outputs.names, *written):
                router.show(value, call.number)


class _Router:
    """Carries values across borders, each value over each border once."""

    def __init__(self, layout: Layout, borders: Borders) -> None:
        self.layout = layout
        self.borders = borders

    def place(self, node: fx.Node) -> None:
        """Make the node a part of its region, and the region a part of every region around it."""
        phase, call = self.layout.regions[node.name]
        part: str | int = node.name
        while True:
            waits = self.borders.waits.setdefault((phase, call), {})
            known = part in waits
            waits.setdefault(part, set())
            if known or call == ROOT_CALL:
                return
            part, call = call, self.layout.parents[phase][call]

    def use(self, value: str, user: str, region: Region) -> None:
        """A node of `region` reads `value`."""
        phase, call = region
        if value in self.layout.state_paths:
            self._read_state(value, region)
        elif value in self.layout.users or value in self.layout.tangents:
            self._from_outside(value, region)
        elif (source := self.layout.regions[value])[0] is phase:
            self._within_phase(value, source[1], user, region)
        else:
            self._across_phases(value, source[1], call)

    def give_back(self, value: str) -> None:
        """The program returns `value`."""
        if value in self.layout.regions:
            phase, call = self.layout.regions[value]
            self._export(value, phase, call, ROOT_CALL)
            self._leaves(value, (phase, ROOT_CALL))

    def show(self, value: str, call: int) -> None:
        """A call returns `value`, whether or not its caller uses it."""
        if value not in self.layout.regions:
            return
        phase, maker = self.layout.regions[value]
        if phase is Phase.FORWARD and self._encloses(call, maker):
            self._export(value, phase, maker, call)
            self._leaves(value, (phase, call))

    def pack(self, call: int) -> None:
        """What a call keeps travels from its forward's caller to its backward's caller as one value."""
        around = {phase: callers[call] for phase, callers in self.layout.parents.items()}
        self._across_phases(pack_of(call), around[Phase.FORWARD], around[Phase.BACKWARD])

    def _within_phase(self, value: str, maker: int, user: str, region: Region) -> None:
        phase, call = region
        made: str | int = value
        used: str | int = user
        depths, parents = self.layout.depths[phase], self.layout.parents[phase]
        while maker != call:
            if depths[maker] > depths[call]:
                self._leaves(value, (phase, maker))
                made, maker = maker, parents[maker]
            else:
                self._enters(value, (phase, call))
                used, call = call, parents[call]
        self.borders.waits[phase, call][used].add(made)

    def _export(self, value: str, phase: Phase, call: int, until: int) -> None:
        while call != until:
            self._leaves(value, (phase, call))
            call = self.layout.parents[phase][call]

    def _read_state(self, name: str, region: Region) -> None:
        phase, call = region
        while (path := self.layout.readable(name, call)) is None:
            self._enters(name, (phase, call))
            call = self.layout.parents[phase][call]
        self.borders.reads.setdefault((phase, call), {})[name] = path

    def _from_outside(self, name: str, region: Region) -> None:
        phase, call = region
        if phase is Phase.BACKWARD and name in self.layout.users:
            self._across_phases(name, ROOT_CALL, call)
            return
        while call != ROOT_CALL:
            self._enters(name, (phase, call))
            call = self.layout.parents[phase][call]

    def _across_phases(self, value: str, maker: int, call: int) -> None:
        """A backward node needs a value of the forward: the nearest call that has it keeps it."""
        while not self._has(value, maker, call):
            self._enters(value, (Phase.BACKWARD, call))
            call = self.layout.parents[Phase.BACKWARD][call]
        self.borders.kept.setdefault(call, {})[value] = None
        if value not in self.borders.inputs.get((Phase.FORWARD, call), {}):
            self._export(value, Phase.FORWARD, maker, call)

    def _has(self, value: str, maker: int, call: int) -> bool:
        if value in self.borders.inputs.get((Phase.FORWARD, call), {}):
            return True
        return self._encloses(call, maker)

    def _encloses(self, call: int, inner: int) -> bool:
        if call >= len(self.layout.program.calls.rows):
            return False  # a repetition has no forward
        depths, parents = self.layout.depths[Phase.FORWARD], self.layout.parents[Phase.FORWARD]
        while depths[inner] > depths[call]:
            inner = parents[inner]
        return inner == call

    def _enters(self, value: str, region: Region) -> None:
        self.borders.inputs.setdefault(region, {})[value] = None

    def _leaves(self, value: str, region: Region) -> None:
        self.borders.outputs.setdefault(region, {})[value] = None


def ranks(layout: Layout, phase: Phase) -> Mapping[str | int, int]:
    """The position of each part of a phase: that of the node, or of the first node inside the call."""
    found: dict[str | int, int] = {}
    for position, node in enumerate(layout.nodes):
        found[node.name] = position
        home, call = layout.regions[node.name]
        while home is phase and call != ROOT_CALL and call not in found:
            found[call] = position
            call = layout.parents[phase][call]
    return found


def _dissolved(layout: Layout, phase: Phase, error: CyclicError) -> dict[Region, str]:
    """Flatten the calls on a circle; without a forward of its own a call can have no backward either."""
    calls = [part for part in error.parts if isinstance(part, int)]
    sites = ", ".join(map(layout.label, calls))
    reason = f"a value leaves {sites} in the {phase.value} and comes back before it has finished"
    phases = (Phase.FORWARD, Phase.BACKWARD) if phase is Phase.FORWARD else (phase,)
    return {(each, call): reason for each in phases for call in calls}


def _finished(
    layout: Layout,
    borders: Borders,
    orders: Mapping[Region, tuple[str | int, ...]],
    flattened: Mapping[Region, str],
) -> Plan:
    program = layout.program
    inlined = {program.entry, *(call for phase, call in flattened if phase is Phase.FORWARD)} - {ROOT_CALL}
    inlined |= {call for phase, call in flattened if call >= len(program.calls.rows)}
    numbers = (number for number in range(len(layout.parents[Phase.FORWARD])) if number not in inlined)
    calls = {number: _call_plan(layout, borders, orders, number) for number in numbers}
    reasons = tuple(Flattened(call, phase, reason) for (phase, call), reason in flattened.items())
    return Plan(program, calls, reasons, layout.regions, layout.repeats)


def _call_plan(
    layout: Layout, borders: Borders, orders: Mapping[Region, tuple[str | int, ...]], number: int
) -> CallPlan:
    forward, backward = (_body(layout, borders, orders, (phase, number)) for phase in layout.parents)
    return CallPlan(number, forward, backward if layout.program.has_backward else None)


def _body(
    layout: Layout, borders: Borders, orders: Mapping[Region, tuple[str | int, ...]], region: Region
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


def _root_inputs(layout: Layout, phase: Phase) -> tuple[str, ...]:
    rows = [row.name for row in layout.program.signature.inputs]
    if phase is Phase.FORWARD:
        return tuple(name for name in rows if name in layout.users)
    return tuple(name for name in (*rows, layout.program.seed) if name in layout.tangents)
