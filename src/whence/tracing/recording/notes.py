"""What is written down while a model runs: one mark per node, one scope per module call."""

import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain, count
from operator import itemgetter

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from whence._torch.autograd.nodes import GradientKey, sequence_number
from whence._torch.autograd.switches import Switches, switches
from whence._torch.tensors import autocast_state
from whence.program import Structure
from whence.provenance import CallSite, Source
from whence.provenance.places import PROGRAM
from whence.schema import Phase, Quality
from whence.tracing.target.loss_state import LossTensor


@dataclass(frozen=True, slots=True)
class Mark:
    """What was known when a node was recorded.

    `moment` is the number of the newest autograd node: the one this operation made, if it made one.
    `cut` are the nodes whose gradient stops here, because the operation ran without grad mode; where the
    model itself had turned that on, gradients are `turned_on`. `hook` is the
    name of the hook that was running; one that `packs` runs inside the operation whose tensor is saved. What
    is `borrowed` ran in a method of a module that was not called, but asked for directly.
    """

    scope: int
    phase: Phase
    moment: int
    source: Source | None
    cut: tuple[fx.Node, ...] = ()
    turned_on: bool = False
    recomputed: bool = False
    hook: str | None = None
    packs: bool = False
    borrowed: bool = False

    @property
    def quality(self) -> Quality:
        """How sure it is that an operation is that of the call it ran in."""
        return Quality.INFERRED if self.borrowed else Quality.EXACT


def ran_without(marks: Mapping[fx.Node, Mark], custom: Set[int]) -> Callable[[fx.Node], bool]:
    """Whether gradients stop at a node, because it ran without; `custom` autograd functions excepted."""

    def stops(node: fx.Node) -> bool:
        mark = marks.get(node)
        return mark is not None and bool(mark.cut) and mark.moment not in custom

    return stops


@dataclass
class Repeat:
    """How far a recomputation has come: the next call and the next random draw that it repeats."""

    scope: int
    draw: int
    rewinds: bool


@dataclass
class Scope:
    """One module call while it is being recorded; `is_reached` if its caller read the module by a name,
    and `autocast`, the `switches` of the process and whether autograd `records` as they were then."""

    site: CallSite
    parent: int
    module: nn.Module | None = None
    parameters: inspect.Signature | None = None
    inputs: Structure | None = None
    outputs: Structure | None = None
    is_reached: bool = True
    autocast: tuple[tuple[str, str], ...] = field(default_factory=autocast_state)
    switches: Switches = field(default_factory=switches)
    records: bool = field(default_factory=torch.is_grad_enabled)


@dataclass(frozen=True)
class AutogradStep:
    """One autograd node that ran: which nodes were recorded meanwhile, what it received and handed on.

    `keys` say where what it produced goes, edge by edge, and `scopes`, where the node stands for
    those of several calls, from which of them each of it comes, sums from several.
    """

    node: Node
    start: int
    end: int
    received: tuple[fx.Node | None, ...]
    produced: tuple[fx.Node | None, ...]
    keys: tuple[GradientKey | None, ...]
    scopes: tuple[tuple[int, ...], ...] | None = None


UNNAMED = "c_lifted_tensor_"
"""How placeholders of tensors begin that nobody has a name for."""


@dataclass
class Notes:
    """Everything written down in one capture.

    `inputs` says of placeholders what they are. `literals` are tensors from outside the model by the names of
    their placeholders, `made` those among them that the model made of numbers while it ran, and `of_loss`
    says by identity what the loss function holds. `composed` is
    true once an operation got a tensor that is made of others. `kept` are the operations that put a gradient
    into the `.grad` of a leaf, each with the identity of that. `keys` says where the gradients of values that
    modules exchange are collected, and `exchanged` are all of those places.
    """

    order: list[fx.Node] = field(default_factory=list)
    marks: dict[fx.Node, Mark] = field(default_factory=dict)
    scopes: list[Scope] = field(default_factory=list)
    transitions: list[tuple[int, int]] = field(default_factory=list)
    steps: list[AutogradStep] = field(default_factory=list)
    keys: dict[fx.Node, GradientKey] = field(default_factory=dict)
    exchanged: set[GradientKey] = field(default_factory=set)
    inputs: dict[fx.Node, str] = field(default_factory=dict)
    literals: dict[str, Tensor] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    layouts_read: list[fx.Node] = field(default_factory=list)
    hooks: dict[str, None] = field(default_factory=dict)
    draws: list[fx.Node] = field(default_factory=list)
    redraws: dict[fx.Node, fx.Node | None] = field(default_factory=dict)
    unpacked: list[fx.Node] = field(default_factory=list)
    of_loss: Mapping[int, LossTensor] = field(default_factory=dict)
    composed: bool = False
    kept: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def parents(self) -> list[int]:
        """The caller of each scope."""
        return [scope.parent for scope in self.scopes]

    def exchange(self, node: fx.Node, key: GradientKey) -> None:
        """Modules exchange a value, whose gradient is collected at `key`."""
        self.keys[node] = key
        self.exchanged.add(key)

    def literal(self, wanted: str | None, tensor: Tensor) -> str:
        """Note a tensor from outside the model, under a name that no other input has."""
        numbered = sum(name.startswith(UNNAMED) for name in self.literals)
        first = wanted or f"{UNNAMED}{numbered}"
        names = chain([first], (f"{first}_{number}" for number in count(1)))
        name = next(name for name in names if not self._is_taken(name))
        self.literals[name] = tensor
        return name

    def _is_taken(self, name: str) -> bool:
        return name in self.literals or any(node.name == name for node in self.inputs)

    def scope_of(self, node: Node) -> int:
        """The innermost call that was running when an autograd node was made."""
        number = sequence_number(node)
        if number is None:
            return PROGRAM
        return self.transitions[bisect_right(self.transitions, number, key=itemgetter(0)) - 1][1]


def first_of_each_moment(notes: Notes) -> dict[int, fx.Node]:
    """The operation that made each autograd node: the first recorded after it was made."""
    makers: dict[int, fx.Node] = {}
    for node in notes.order:
        mark = notes.marks[node]
        if mark.phase is Phase.FORWARD and not mark.packs:
            makers.setdefault(mark.moment, node)
    return makers


def maker_of(node: Node, makers: Mapping[int, fx.Node]) -> fx.Node | None:
    """The operation that an autograd node differentiates."""
    number = sequence_number(node)
    return None if number is None else makers.get(number)
