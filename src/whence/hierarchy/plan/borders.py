"""Follow every value from where it is made to every place it is used."""

from dataclasses import dataclass, field

from whence.hierarchy.plan.facts import PHASES, BodyPart, NodeLayout, Parts
from whence.hierarchy.plan.plan import ROOT_CALL, Region, pack_of
from whence.provenance import ModulePath
from whence.schema import Phase


@dataclass
class Borders:
    """What crosses the borders of each region, and which parts of it wait for which."""

    inputs: dict[Region, dict[str, None]] = field(default_factory=dict)
    outputs: dict[Region, dict[str, None]] = field(default_factory=dict)
    reads: dict[Region, dict[str, ModulePath]] = field(default_factory=dict)
    kept: dict[int, dict[str, None]] = field(default_factory=dict)
    waits: dict[Region, dict[str | int, set[str | int]]] = field(default_factory=dict)


def trace_borders(layout: NodeLayout, parts: Parts) -> Borders:
    """Follow every value from where it is made to every place it is used, forward uses first."""
    borders = Borders()
    router = _Router(layout, parts, borders)
    for part in parts.rows:
        router.place(part)
    for phase in PHASES:
        for part in parts.rows:
            if part.region[0] is phase:
                for value in part.needs:
                    router.use(value, part)
    for number in layout.kept_calls:
        router.preserve(number)
    _trace_results(layout, borders, router)
    for number in layout.kept_calls if layout.program.has_backward else ():
        router.keep_something(number)
    for call in reversed(layout.program.calls.rows[1:]):
        if borders.kept.get(call.number) or call.number in parts.keeping:
            router.pack(call.number)
    return borders


def _trace_results(layout: NodeLayout, borders: Borders, router: "_Router") -> None:
    """What the program returns, the values its state goes through, and what each call returns."""
    returned = [row.node for row in layout.program.signature.outputs if row.node is not None]
    histories = layout.program.facts.histories.values()
    for value in (*returned, *(value for history in histories for value in history)):
        router.give_back(value)
    for call in layout.program.calls:
        if call.outputs is not None and (Phase.FORWARD, call.number) in borders.waits:
            taken = call.inputs.names if call.inputs is not None else ()
            written = (value for name in taken for value in layout.program.facts.written.get(name, ()))
            for value in (*call.outputs.names, *written):
                router.show(value, call.number)


class _Router:
    """Carries values across borders, each value over each border once."""

    def __init__(self, layout: NodeLayout, parts: Parts, borders: Borders) -> None:
        self.layout = layout
        self.makers = parts.makers
        self.borders = borders

    def place(self, part: BodyPart) -> None:
        """Make the part a step of its region, and the region a step of every region around it."""
        phase, call = part.region
        step = part.step
        while True:
            waits = self.borders.waits.setdefault((phase, call), {})
            known = step in waits
            waits.setdefault(step, set())
            if known or call == ROOT_CALL:
                return
            step, call = call, self.layout.parents[phase][call]

    def use(self, value: str, user: BodyPart) -> None:
        phase, call = user.region
        if value in self.layout.state_paths:
            self._read_state(value, user.region)
        elif value in self.layout.users or value in self.layout.tangents:
            self._from_outside(value, user.region)
        elif (maker := self.makers[value]).region[0] is phase:
            self._within_phase(value, maker, user)
        else:
            self._across_phases(value, maker.region[1], call)

    def give_back(self, value: str) -> None:
        if value in self.makers:
            phase, call = self.makers[value].region
            self._export(value, phase, call, ROOT_CALL)
            self._leaves(value, (phase, ROOT_CALL))

    def show(self, value: str, call: int) -> None:
        """A call returns `value`, whether or not its caller uses it."""
        if value not in self.makers:
            return
        phase, maker = self.makers[value].region
        if phase is Phase.FORWARD and self._encloses(call, maker):
            self._export(value, phase, maker, call)
            self._leaves(value, (phase, call))

    def preserve(self, call: int) -> None:
        """A call takes all its arguments, whether or not anything inside reads them."""
        inputs, around = self.layout.program.calls.rows[call].inputs, self.layout.parents[Phase.FORWARD][call]
        taker = BodyPart(call, (Phase.FORWARD, around))
        self.borders.waits.setdefault((Phase.FORWARD, call), {})
        self.place(taker)
        for value in inputs.names if inputs is not None else ():
            maker = self.makers.get(value)
            if maker is None or (
                maker.region[0] is Phase.FORWARD and not self._encloses(call, maker.region[1])
            ):
                self._enters(value, (Phase.FORWARD, call))
                self.use(value, taker)

    def keep_something(self, call: int) -> None:
        """A call that another module may run keeps a value for its backward, so that the module can, too."""
        region = (Phase.FORWARD, call)
        values = [*self.borders.outputs.get(region, {}), *self.borders.inputs.get(region, {})]
        if (Phase.BACKWARD, call) in self.borders.waits and not self.borders.kept.get(call):
            self.borders.kept.setdefault(call, {}).update(dict.fromkeys(values[:1]))

    def pack(self, call: int) -> None:
        """What a call keeps travels from its forward's caller to its backward's caller as one value."""
        around = {phase: callers[call] for phase, callers in self.layout.parents.items()}
        self._across_phases(pack_of(call), around[Phase.FORWARD], around[Phase.BACKWARD])

    def _within_phase(self, value: str, made: BodyPart, used: BodyPart) -> None:
        (phase, maker), (_, call) = made.region, used.region
        before, after = made.step, used.step
        depths, parents = self.layout.depths[phase], self.layout.parents[phase]
        while maker != call:
            if depths[maker] > depths[call]:
                self._leaves(value, (phase, maker))
                before, maker = maker, parents[maker]
            else:
                self._enters(value, (phase, call))
                after, call = call, parents[call]
        self.borders.waits[phase, call][after].add(before)

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
        if call >= self.layout.numbering.count:
            return False  # a repetition has no forward
        depths, parents = self.layout.depths[Phase.FORWARD], self.layout.parents[Phase.FORWARD]
        while depths[inner] > depths[call]:
            inner = parents[inner]
        return inner == call

    def _enters(self, value: str, region: Region) -> None:
        self.borders.inputs.setdefault(region, {})[value] = None

    def _leaves(self, value: str, region: Region) -> None:
        self.borders.outputs.setdefault(region, {})[value] = None
