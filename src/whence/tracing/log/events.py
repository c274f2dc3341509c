"""What can happen while a model runs: each kind of event is one frozen record."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from whence._torch.autograd.nodes import GradientKey
from whence._torch.autograd.switches import Switches, switches
from whence._torch.tensor_questions import Answer
from whence._torch.tensors import autocast_state
from whence.program import InputQuery, ModeQuery, Structure
from whence.provenance import CallSite, Source
from whence.schema import Phase, Quality, TensorFact
from whence.tracing.target.loss_state import LossTensor


class Marked(NamedTuple):
    """A node was recorded, and what was known then: a tuple, for there is one of every node.

    `moment` is the number of the newest autograd node: the one this operation made, if it made one.
    `cut` are the nodes whose gradient stops here, because the operation ran without grad mode; where the
    model itself had turned that on, gradients are `turned_on`; one that asks is `turned_off` where it had
    not. What ran `in_function`, a custom one of autograd's, has gradients where that made a node. `hook` is
    the name of the hook that was running; one that `packs` runs inside the operation whose tensor is saved.
    What is `borrowed` ran in a method of a module that was not called, but asked for directly.
    """

    node: fx.Node
    scope: int
    phase: Phase
    moment: int
    source: Source | None
    cut: tuple[fx.Node, ...] = ()
    turned_on: bool = False
    turned_off: bool = False
    in_function: bool = False
    recomputed: bool = False
    hook: str | None = None
    packs: bool = False
    borrowed: bool = False

    @property
    def quality(self) -> Quality:
        """How sure it is that an operation is that of the call it ran in."""
        return Quality.INFERRED if self.borrowed else Quality.EXACT


@dataclass(frozen=True, slots=True)
class Reconsidered:
    """A node turned out to be of another phase."""

    node: fx.Node
    phase: Phase


class Opened(NamedTuple):
    """A module is called; `is_reached` if its caller read the module by a name, and `autocast`, the
    `switches` of the process and whether autograd `records` as they were."""

    site: CallSite
    parent: int
    module: nn.Module | None
    parameters: inspect.Signature | None
    is_reached: bool
    autocast: tuple[tuple[str, str], ...]
    switches: Switches
    records: bool

    @classmethod
    def now(
        cls,
        site: CallSite,
        parent: int,
        module: nn.Module | None = None,
        parameters: inspect.Signature | None = None,
        *,
        is_reached: bool = True,
    ) -> "Opened":
        """A call that begins now."""
        told = autocast_state(), switches(), torch.is_grad_enabled()
        return cls(site, parent, module, parameters, is_reached, *told)


class Took(NamedTuple):
    """What a call takes is known."""

    scope: int
    inputs: Structure


class Gave(NamedTuple):
    """What a call gives is known."""

    scope: int
    outputs: Structure


class Moved(NamedTuple):
    """From this moment of autograd on, another call runs."""

    moment: int
    scope: int


class Stepped(NamedTuple):
    """One autograd node ran: which nodes were recorded meanwhile, what it received and handed on.

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


@dataclass(frozen=True, slots=True)
class GradientKept:
    """An operation put a gradient into the `.grad` of the leaf with this identity."""

    node: fx.Node
    leaf: int


class Crossed(NamedTuple):
    """Modules exchange a value, whose gradient is collected at `key`."""

    node: fx.Node
    key: GradientKey


class InputNamed(NamedTuple):
    """A placeholder is an input, and what that is called in words."""

    node: fx.Node
    words: str


class GivenTensor(NamedTuple):
    """A fake tensor is the twin of one among the arguments, and what it answered to questions before the
    run."""

    twin: Tensor
    node: fx.Node
    position: int
    tensor: Tensor
    answers: Mapping[str, Answer]


class InputQueried(NamedTuple):
    """The model asked something of an argument."""

    query: InputQuery


@dataclass(frozen=True, slots=True)
class Met:
    """A tensor from outside the model reached an operation, and has a placeholder of this name."""

    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class MadeOfNumbers:
    """A tensor from outside is one that the model had just made of numbers."""

    name: str


@dataclass(frozen=True, slots=True)
class LossHolds:
    """What the loss function holds, by identity."""

    tensors: Mapping[int, LossTensor]


@dataclass(frozen=True, slots=True)
class TensorAsked:
    """The model asked something of a value."""

    node: fx.Node
    fact: TensorFact


@dataclass(frozen=True, slots=True)
class ModeQueried:
    """The model asked how a mode is that its caller may have set."""

    mode: ModeQuery


@dataclass(frozen=True, slots=True)
class TookApart:
    """A composite was not recorded whole."""

    composite: Any


@dataclass(frozen=True, slots=True)
class DtypeQueried:
    """Python asked a tensor for its dtype, in this line."""

    line: str


@dataclass(frozen=True, slots=True)
class MadeContiguous:
    """The model made a value contiguous that was so already: nothing was recorded. None for a part of one, as
    `vmap` has them."""

    node: fx.Node | None


@dataclass(frozen=True, slots=True)
class Drew:
    """A random operation was recorded; one that `repeats` draws again what `first` drew, if that is known."""

    node: fx.Node
    repeats: bool = False
    first: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A backward inside the model looked at a result that was saved."""

    node: fx.Node


@dataclass(frozen=True, slots=True)
class Lost:
    """Something that autograd cannot find again in a forward-only program."""

    what: str


@dataclass(frozen=True, slots=True)
class Announced:
    """Tensors with these identities are made of others, and have gradients of their own."""

    wholes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MetComposed:
    """An operation got a tensor that is made of others."""


Event = (
    Marked
    | Reconsidered
    | Opened
    | Took
    | Gave
    | Moved
    | Stepped
    | GradientKept
    | Crossed
    | InputNamed
    | GivenTensor
    | InputQueried
    | Met
    | MadeOfNumbers
    | LossHolds
    | TensorAsked
    | ModeQueried
    | DtypeQueried
    | TookApart
    | MadeContiguous
    | Drew
    | Unpacked
    | Lost
    | Announced
    | MetComposed
)
