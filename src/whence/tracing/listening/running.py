"""Which calls and autograd nodes run, and how far recomputations have come."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from whence._torch.autograd.calls_not_run import calls_behind
from whence._torch.autograd.derivatives import as_eager_takes_it
from whence._torch.autograd.nodes import GradientKey, keys_out, next_sequence_number
from whence._torch.record.recorder import Recorder
from whence.provenance import CallSite, ModulePath
from whence.provenance.places import PROGRAM
from whence.schema import Phase
from whence.tracing.attribution.gradient_edges import as_own_nodes
from whence.tracing.attribution.wrapper_subclasses import in_parts
from whence.tracing.log.events import Drew, Moved, Opened, Stepped
from whence.tracing.log.log import Log


@dataclass
class _Repeat:
    """How far a recomputation has come: the next call and the next random draw that it repeats."""

    scope: int
    draw: int
    rewinds: bool


class Begun(NamedTuple):
    """An autograd node that runs: how much had been recorded before it, and what it received."""

    node: Node
    start: int
    received: tuple[fx.Node | None, ...]


@dataclass
class Course:
    """The run itself, or a backward that is rehearsed apart: what of it runs, and the log it is written in.

    `arrived` are the places that hold a gradient already.
    """

    log: Log
    phase: Phase
    calls: list[int] = field(default_factory=list)
    nodes: list[Begun] = field(default_factory=list)
    arrived: set[GradientKey] = field(default_factory=set)


class Running:
    """What runs now; `failed` is the call that an exception left, until another one begins."""

    def __init__(self, name: str) -> None:
        self._now = Course(Log(), Phase.FORWARD)
        self._repeats: list[_Repeat] = []
        self.failed: int | None = None
        self._enter(self.opened(Opened.now(CallSite(ModulePath(), 0, name), PROGRAM)))

    @property
    def log(self) -> Log:
        """Where everything is written down now."""
        return self._now.log

    @property
    def phase(self) -> Phase:
        """The phase that runs."""
        return self._now.phase

    @property
    def scope(self) -> int:
        """The call that runs."""
        return self._now.calls[-1]

    @property
    def module(self) -> nn.Module | None:
        """The module that runs."""
        return self.log.scopes[self.scope].module

    @property
    def is_outside(self) -> bool:
        """Whether no module's code runs."""
        return self._now.calls == [PROGRAM]

    @property
    def repeats(self) -> bool:
        """Whether a checkpoint computes its region again."""
        return bool(self._repeats)

    @property
    def arrived(self) -> set[GradientKey]:
        """The places that hold a gradient already."""
        return self._now.arrived

    def enter_phase(self, phase: Phase) -> None:
        """Another phase begins."""
        self._now.phase = phase

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Inside the block another phase runs."""
        before = self.phase
        self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(before)

    def pass_begins(self, keys: Sequence[GradientKey | None]) -> None:
        """A backward begins with gradients at these places."""
        self.enter_phase(Phase.BACKWARD)
        self.arrived.clear()
        self.arrived.update(key for key in keys if key is not None)

    @contextmanager
    def forked(self) -> Iterator[Log]:
        """Write what a rehearsed backward records apart from everything else."""
        before, self._now = self._now, Course(self.log.fork(), Phase.BACKWARD, [PROGRAM])
        try:
            yield self.log
        finally:
            self._now = before

    # --- calls ---------------------------------------------------------------------------------------

    def opened(self, call: Opened) -> int:
        """The number of a call that begins."""
        self.log.add(call)
        return len(self.log.scopes) - 1

    @contextmanager
    def inside(self, scope: int) -> Iterator[None]:
        """Inside the block a call runs."""
        self._enter(scope)
        finished = False
        try:
            yield
            finished = True
        finally:
            if not finished and self.failed is None:
                self.failed = scope
            self._now.calls.pop()
            self.log.add(Moved(next_sequence_number(), self.scope))

    def _enter(self, scope: int) -> None:
        self.failed = None
        self._now.calls.append(scope)
        self.log.add(Moved(next_sequence_number(), scope))

    # --- recomputations ------------------------------------------------------------------------------

    def here(self) -> tuple[int, int, int]:
        """The call that runs, and how many calls and random draws there have been."""
        return self.scope, len(self.log.scopes), len(self.log.draws)

    @contextmanager
    def again(self, since: tuple[int, int, int], rewinds: bool) -> Iterator[None]:
        """Inside the block a region is computed again that began at that place."""
        scope, call, draw = since
        self._repeats.append(_Repeat(call, draw, rewinds))
        try:
            with self.inside(scope):
                yield
        finally:
            self._repeats.pop()

    def repeated(self, path: ModulePath) -> int:
        """The forward call that a call in the backward repeats: the next of that path in the checkpointed
        region.

        Modules called in the backward without a checkpoint (by a custom autograd function) repeat their
        first call.
        """
        start = self._repeats[-1].scope if self._repeats else 1
        scopes = self.log.scopes
        found = next((n for n in range(start, len(scopes)) if scopes[n].site.path == path), None)
        if found is None:
            return self.scope
        if self._repeats:
            self._repeats[-1].scope = found + 1
        return found

    def drawn_again(self, node: fx.Node) -> Drew | None:
        """The draw of a recomputation that rewinds, which repeats one; None for any other."""
        if not self._repeats or not (repeat := self._repeats[-1]).rewinds:
            return None
        first = self.log.draws[repeat.draw] if repeat.draw < len(self.log.draws) else None
        repeat.draw += 1
        return Drew(node, repeats=True, first=first)

    # --- autograd ------------------------------------------------------------------------------------

    def node_begins(self, node: Node, received: tuple[fx.Node | None, ...]) -> None:
        """An autograd node begins to run."""
        self._now.nodes.append(Begun(node, len(self.log.order), received))

    def node_is_over(self) -> Begun:
        """The autograd node that has run."""
        return self._now.nodes.pop()

    def user_of_sizes(self) -> object:
        """The module call in the forward; in the backward, or one that is rehearsed, the autograd node."""
        if self.phase is Phase.FORWARD:
            return self.scope, None
        nodes = self._now.nodes
        running = id(nodes[-1].node) if nodes else len(self.log.order)
        return self.scope, (id(self.log), running)


@dataclass(frozen=True)
class Passes:
    """Writes down every step of a backward.

    With `own_gradients`, a gradient that is handed on as it came is a node of its own where modules exchange
    the value that it is for.
    """

    running: Running
    recorder: Recorder
    own_gradients: bool
    reported: set[int] = field(default_factory=set, kw_only=True)

    def node_starts(self, node: Node, received: Sequence[Tensor | None]) -> None:
        """An autograd node begins: what is recorded until it ends is its backward."""
        self.running.node_begins(node, self._nodes(in_parts((), received)[1]))

    def node_ends(self, node: Node, produced: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """An autograd node has ended: note what it hands on, edge by edge."""
        edges, begun, log = keys_out(node), self.running.node_is_over(), self.running.log
        produced = as_eager_takes_it(self.recorder, node, (log.order, begun.start), produced)
        if self.own_gradients:
            produced = as_own_nodes(self.recorder, log, edges, begun.start, produced)
        keys, plain = in_parts(edges, produced)
        handed, end = self._nodes(plain), len(log.order)
        log.add(Stepped(node, begun.start, end, begun.received, handed, keys, calls_behind(node)))
        arrived = (key for key, value in zip(keys, handed, strict=False) if key and value)
        self.running.arrived.update(arrived)
        return produced

    def _nodes(self, tensors: Sequence[Tensor | None]) -> tuple[fx.Node | None, ...]:
        return tuple(None if tensor is None else self.recorder.node_of(tensor) for tensor in tensors)
