"""What a plan is: which call holds which node, what crosses its borders, and in which order its parts run.

A plan is data: it can be checked, printed and emitted, and nothing in it changes once it is made. Calls are
numbers (their order in the program), values are names of graph nodes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from torch import fx

from whence.program import FlatProgram
from whence.program.calls import Call
from whence.provenance import CallSite, ModulePath
from whence.schema import Phase

ROOT_CALL = 0
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


class Half(Enum):
    """A function of a call; the backward that goes on with gradients `IN_PIECES` runs where others took the
    places of preserved calls."""

    FORWARD = "forward"
    BACKWARD = "backward"
    IN_PIECES = "in pieces"

    @property
    def phase(self) -> Phase:
        return Phase.FORWARD if self is Half.FORWARD else Phase.BACKWARD


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
class Numbering:
    """The calls of a plan: the `count` calls of the program, and those that a checkpoint makes again.

    What a checkpoint computes again in the backward is a call of its own there: it runs before the backward
    that asked for it. Such calls are numbered after those of the program, and `repeats` gives the call each
    repeats.
    """

    count: int
    repeats: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.count + len(self.repeats)

    @cached_property
    def repeat_of(self) -> dict[int, int]:
        """The number of the repetition of a call, for those that have one."""
        return {call: self.count + position for position, call in enumerate(self.repeats)}

    def original(self, number: int) -> int:
        """The call of the program that a call of the plan is, or repeats."""
        return number if number < self.count else self.repeats[number - self.count]

    def moved(self, number: int, one: int, other: int) -> int:
        """The call that is to `other` what `number` is to `one`; raises `KeyError` where there is none."""
        found = self.original(number) + self.original(other) - self.original(one)
        return found if number < self.count else self.repeat_of[found]


@dataclass(frozen=True)
class Plan:
    """Every call that gets a graph of its own, by number; `regions` says where each operation lives.

    `first` gives for each call the first that equals it (itself, where none before does): they share a body.
    `callers` is the tree of the calls, flattened ones left out, in each phase.
    """

    program: FlatProgram
    calls: Mapping[int, CallPlan]
    flattened: tuple[Flattened, ...]
    regions: Mapping[str, Region]
    numbering: Numbering
    first: tuple[int, ...]
    callers: Mapping[Phase, tuple[int, ...]]

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.program.graph.nodes}

    @cached_property
    def positions(self) -> dict[str, int]:
        """Where each node stands in the graph."""
        return {name: position for position, name in enumerate(self.nodes)}

    @cached_property
    def operations(self) -> dict[Region, list[fx.Node]]:
        """What each call computes itself in each phase, in order."""
        found: dict[Region, list[fx.Node]] = {}
        for name, region in self.regions.items():
            found.setdefault(region, []).append(self.nodes[name])
        return found

    @property
    def distinct(self) -> list[int]:
        """The calls that do not share the body of an earlier one."""
        return [number for number in self.calls if self.first[number] == number]

    @cached_property
    def made(self) -> frozenset[int]:
        """The calls that bodies make in the forward: none in a plan that is flat, or that was flattened."""
        bodies = (call.forward for call in self.calls.values())
        return frozenset(step for body in bodies for step in body.steps if isinstance(step, int))

    @cached_property
    def preserved(self) -> dict[ModulePath, frozenset[int]]:
        """The modules whose calls are preserved, each with these and the calls inside them."""
        found: dict[ModulePath, set[int]] = {}
        for number in self.program.calls.preserved:
            found.setdefault(self.site(number).path, set()).update(self.program.calls.within(number))
        return {path: frozenset(calls) for path, calls in found.items()}

    @cached_property
    def untold(self) -> frozenset[str]:
        """Nodes that stand for several gradients, so that nobody can tell when each of them arrived."""
        adjoints = self.program.facts.adjoints.values()
        parts = [part for adjoint in adjoints for part in adjoint.contributions]
        times = Counter([part.node for part in parts])
        sums = {part.sum for part in parts}
        return frozenset(name for name, count in times.items() if count > 1 or name in sums)

    def is_of_preserved(self, path: ModulePath) -> bool:
        """Whether an attribute path is of a module whose calls are preserved."""
        return not self.preserved.keys().isdisjoint(path.prefixes())

    @cached_property
    def renamed(self) -> tuple[Call, ...]:
        """The calls of modules that may have been reached by other names, too."""
        return tuple(row for row in self.program.calls if row.others)

    def original(self, number: int) -> int:
        """The call of the program that a call of the plan is, or repeats."""
        return self.numbering.original(number)

    def site(self, number: int) -> CallSite:
        return self.program.calls.rows[self.original(number)].site

    def body(self, phase: Phase, number: int) -> Body:
        """What a call computes in a phase; nothing, where the program has no backward."""
        call = self.calls[number]
        backward = call.backward or Body((), (), (), ())
        return call.forward if phase is Phase.FORWARD else backward

    def takes(self, phase: Phase, number: int) -> tuple[str, ...]:
        """What the function of a call takes: a backward first what its forward kept."""
        body = self.body(phase, number)
        pack = (pack_of(number),) if body.kept and phase is Phase.BACKWARD else ()
        return (*pack, *body.inputs)

    def gives(self, phase: Phase, number: int) -> tuple[str, ...]:
        """What the function of a call returns: a forward last what its backward needs."""
        body = self.body(phase, number)
        pack = (pack_of(number),) if body.kept and phase is Phase.FORWARD else ()
        return (*body.outputs, *pack)


def first_within(paths: Iterable[ModulePath], here: ModulePath) -> ModulePath | None:
    """The first of `paths` that lies within the module `here`, from there on."""
    return next((path.relative_to(here) for path in paths if path.is_within(here)), None)


def pack_of(call: int) -> str:
    """The name of the value that carries what a call keeps for its backward; no node can have such a name."""
    return f"kept@{call}"


def packed_call(name: str) -> int | None:
    """The call whose pack a value is; None for nodes."""
    _, _, number = name.partition("@")
    return int(number) if number else None


def pack_label(name: str, spelled: Callable[[int], str]) -> str:
    """How a value is shown: itself, or `kept_` and the call it is a pack of."""
    call = packed_call(name)
    return name if call is None else f"kept_{spelled(call)}"
