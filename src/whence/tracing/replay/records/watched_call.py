"""A call that runs and is watched: what is noted of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from whence._torch.autograd.nodes import next_sequence_number
from whence._torch.graphs import NameCounts
from whence._torch.observe.attribute_reads import is_observable, own_attributes
from whence._torch.pytrees import TreeSpec
from whence._torch.sizes.symbols import SizesKnown, shape_env_version
from whence._torch.tensors import without_functions
from whence.dependence.object_graph import ReachedThing, parts_of
from whence.dependence.observed import Read
from whence.dependence.snapshots import CONTAINERS, Saved, containers_saved, slots_of
from whence.dependence.tensor_facts import AllFacts, all_facts_of
from whence.dependence.variables import Variables
from whence.provenance import Source
from whence.tracing.listening.recording import Recording

MIN_OPERATORS = 8
"""From how many operations on copying them pays."""
SMALL = "it is small"

Counts = Mapping[Any, int]
"""How often each torch function was called."""


_CODE = (type, FunctionType, BuiltinFunctionType, partial, _lru_cache_wrapper)


class Unfit(Exception):
    """What a call recorded cannot stand for other calls; the text says why."""


@dataclass
class ReadsSeen:
    """What is noted while a watched call runs: what it reads, with copies of containers and slots, and what
    it does that is not for other calls."""

    variables: Variables
    reads: dict[tuple[int, str], tuple[Read, Sequence[Saved]]] = field(default_factory=dict)
    tensors: dict[int, tuple[Tensor, AllFacts]] = field(default_factory=dict)
    slotted: dict[int, ReachedThing] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def read(self, read: Read) -> None:
        """An attribute was read."""
        key = (id(read.holder), read.name)
        if key not in self.reads:
            held = containers_saved([(read.name, read.value)]) if isinstance(read.value, CONTAINERS) else ()
            self.reads[key] = (read, held)
            if isinstance(read.value, Tensor):
                self.meet_tensor(read.value)
            elif isinstance(read.value, (*_CODE, *CONTAINERS, tuple)):
                self._meet_code(read)
            elif is_observable(type(read.value)) and not isinstance(read.value, nn.Module):
                self._meet(read.value)

    def _meet_code(self, read: Read) -> None:
        """Functions and classes that a holder keeps itself, also in containers: they hold things, too."""
        held = own_attributes(read.holder).get(read.name)
        waiting: list[Any] = [held] if held is read.value else []
        while waiting:
            value = waiting.pop()
            if type(value) is partial:  # compared by what it is made of
                made_of = (value.func, *value.args, *value.keywords.values())
                waiting += made_of
                for held in (part for part in made_of if isinstance(part, CONTAINERS)):
                    self.variables.reached.add(held, read.name)
            elif isinstance(value, _CODE):
                self.variables.reached.add(value, read.name)
            elif type(value) is dict:
                waiting += value.values()
            elif type(value) in (list, tuple):
                waiting += value

    def meet_tensor(self, tensor: Tensor) -> None:
        """A tensor was given or read: a call may change how it is."""
        if id(tensor) not in self.tensors:
            with without_functions():
                self.tensors[id(tensor)] = (tensor, all_facts_of(tensor))

    def _meet(self, thing: object) -> None:
        """An object was read: its class may have attributes, too, and it may have some in slots."""
        self.variables.reached.add(type(thing), type(thing).__name__)
        if slots_of(type(thing)) and id(thing) not in self.slotted:
            self.slotted[id(thing)] = ReachedThing(thing, parts_of(thing))


class CallArguments(NamedTuple):
    """What a call is given: as it is, and as leaves of a structure."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Start:
    """How far a capture had come: in its log, in autograd, in counting names and torch functions, and in
    what is known about sizes.

    `begin` marks the place in the graph.
    """

    begin: fx.Node
    position: int
    asked: int
    contiguous: int
    moment: int
    names: NameCounts
    called: Counts
    sizes_known: SizesKnown

    @classmethod
    def now(cls, recording: Recording, begin: fx.Node) -> "Start":
        """How far it has come."""
        return cls(
            begin=begin,
            position=len(recording.log.order),
            asked=len(recording.log.asked),
            contiguous=len(recording.log.contiguous),
            moment=next_sequence_number(),
            names=NameCounts.now(recording.recorder.graph),
            called=dict(recording.recorder.calls_of_functions()),
            sizes_known=shape_env_version(recording.recorder.environment),
        )

    def names_since(self, graph: fx.Graph) -> NameCounts:
        """How many names of each base were given since then."""
        return NameCounts.now(graph).since(self.names)

    def functions_since(self, now: Counts) -> Counts:
        """How often each torch function was called since then."""
        more = {function: count - self.called.get(function, 0) for function, count in now.items()}
        return {function: count for function, count in more.items() if count}


@dataclass(frozen=True)
class WatchedCall:
    """A call that is being watched.

    `nodes` are those of its arguments, `modes` what was switched on, `caller` the line it is made in, and
    `attributes` copies of what the module and those inside it hold.
    """

    module: nn.Module
    scope: int
    given: CallArguments
    nodes: tuple[fx.Node | None, ...]
    modes: tuple[Any, ...]
    seen: ReadsSeen
    variables: Variables
    caller: Source | None
    attributes: Sequence[tuple[nn.Module, dict[str, Any]]]
    start: Start


@dataclass(frozen=True)
class Outcome:
    """What a watched call returned: its structure, and for every leaf a node, or a constant."""

    result: Any
    spec: TreeSpec
    leaves: tuple[Any, ...]
    nodes: tuple[fx.Node | None, ...]


@dataclass(frozen=True)
class Border:
    """The values that cross the border of a call, by the tensors that hold them."""

    inputs: tuple[tuple[fx.Node, Tensor], ...]
    outputs: tuple[tuple[fx.Node, Tensor], ...]


def attributes_below(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """A module and those inside it, each with a copy of its attributes, looked at without asking it."""
    waiting, found = [module], dict[int, tuple[nn.Module, dict[str, Any]]]()
    while waiting:
        inner = waiting.pop()
        if id(inner) not in found:
            found[id(inner)] = (inner, dict(vars(inner)))
            waiting += [child for child in vars(inner)["_modules"].values() if child is not None]
    return list(found.values())
