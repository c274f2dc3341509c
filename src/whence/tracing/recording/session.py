"""Listens while a model runs, and writes down what there is to know of every node and every module call."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from whence._torch.autograd.derivatives import as_eager_takes_it
from whence._torch.autograd.nodes import (
    GradientKey,
    gradient_key,
    history_of,
    inside_backward,
    keys_out,
    next_sequence_number,
    release_scans,
)
from whence._torch.observe.hooks import described
from whence._torch.observe.module_calls import ObservedCall
from whence._torch.operators.schemas import draws
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_flatten
from whence._torch.record.annotations import note_annotations
from whence._torch.record.recorder import FakeTensorMode, Recorder
from whence._torch.sizes.symbols import SYMBOLIC, is_symbolic, number_of
from whence.errors import CaptureError, Place, UnsupportedMutation
from whence.program import Absent, Constant, Named, Structure
from whence.provenance import CallSite, ModulePath, Source
from whence.provenance.places import PROGRAM
from whence.schema import Phase
from whence.tracing.attribution.own_gradients import as_own_nodes
from whence.tracing.attribution.stopped_gradients import Cuts
from whence.tracing.attribution.wrapper_subclasses import (
    COMPOSED,
    in_parts,
    keys_of_parts,
    refuse_lost_gradient,
)
from whence.tracing.reads.attribute_reads import Reads
from whence.tracing.recording.branches import Branches
from whence.tracing.recording.call_names import CallNames
from whence.tracing.recording.data_dependence import data_dependent, refused_size, tensors_read, value_of
from whence.tracing.recording.error_notes import CaptureNoting
from whence.tracing.recording.hook_lines import Watch
from whence.tracing.recording.notes import AutogradStep, Mark, Notes, Repeat, Scope
from whence.tracing.recording.raising_branches import required
from whence.tracing.refusals import data_replaced, hook_kept, object_met
from whence.tracing.replay.records.template import CompositeOpened
from whence.tracing.replay.replayer import Replayer
from whence.tracing.replay.reuse import Reuse
from whence.tracing.sandbox.interrupts import Interrupts
from whence.tracing.sandbox.module_snapshot import Lines
from whence.tracing.sandbox.random_states import RandomStates
from whence.tracing.source_lines import SourceFinder, frame_outside
from whence.tracing.target.subject import Signatures, Subject


class Session:
    """Listens to modules, operations and autograd on one thread, and takes notes."""

    recorder_kind, fills_gradients = Recorder, False
    own_gradients: bool = False

    def __init__(
        self,
        subject: Subject,
        mode: FakeTensorMode,
        finder: SourceFinder,
        lines: Lines,
        held: Interrupts,
        reuse: Reuse,
    ) -> None:
        self._interrupts = held
        self.subject = subject
        self.notes = Notes()
        self.recorder = self.recorder_kind(self, mode)
        self.recorder.keeps_composites, self.recorder.is_joint = reuse.composites, reuse.joint
        self.answers = reuse.answers
        self.phase = Phase.FORWARD
        self.is_plainly_eager: Callable[[], bool] = bool
        self.names = CallNames(subject)
        self.reads = Reads(subject, lines, self.reading, self.is_user)
        self.grad_modes = Cuts(lambda: "is_grad_enabled" in self.reads.reachable.names)
        self._finder, finder.modules = finder, frozenset(id(module) for _, module in subject.named_modules())
        self.replayer = Replayer(self, [module for _, module in subject.named_modules()], reuse)
        self.random_states = RandomStates(subject.name, self.here, self.replayer.distrust)
        self.watch = Watch(subject, self._finder, lines, self.replayer.unfit)
        self.branches = Branches(self, differentiates=reuse.joint)
        self.arrived: set[GradientKey] = set()
        lines.maker = self._line_that_made
        self._stack: list[int] = []
        self._alive: list[object] = []
        self._started: list[tuple[Node, int, tuple[fx.Node | None, ...]]] = []
        self._known_tensors: dict[int, str] = {}
        self._wholes: set[int] = set()
        self._repeats: list[Repeat] = []
        self._signatures = Signatures()
        self._failed: int | None = None
        self._enter(self._open(CallSite(ModulePath(), 0, subject.name), PROGRAM))

    # --- modules -------------------------------------------------------------------------------------

    @contextmanager
    def called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[ObservedCall]:
        """A module call: a new scope in the forward pass, the old one again where a checkpoint recomputes."""
        self._interrupts.let_in()
        with self.watch.calling(module), self._call(module, args, kwargs) as call:
            yield call

    @contextmanager
    def _call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[ObservedCall]:
        path = None if self.branches.retraces else self.names.path(module)
        if path is None:
            yield ObservedCall(_ignore)
        elif self.phase is Phase.BACKWARD:
            with self._inside(self._repeated(path)):
                yield ObservedCall(_ignore)
        else:
            is_reached = self.names.is_reached(module)
            with self.names.calling(module, path) as site:
                if self.branches.recorder is not self.recorder:
                    with self._inside(self._open(site, self._stack[-1])):
                        yield ObservedCall(_ignore)
                    return
                scope = self._begin(module, site, (args, kwargs))
                self.notes.scopes[scope].is_reached = is_reached
                with self._inside(scope), self.replayer.call(module, scope, args, kwargs) as call:
                    if call.answer is not None:
                        self._describe_result(scope, call.answer[0])
                    yield replace(call, returned=partial(self._returned, scope, call))

    def _returned(self, scope: int, call: ObservedCall, result: Any) -> None:
        self._describe_result(scope, result)
        call.returned(result)

    @contextmanager
    def apart(self) -> Iterator[Notes]:
        """Note what a rehearsed backward records apart from everything else."""
        before = (self.notes, self.phase, self._stack, self.arrived, self._started)
        self.notes = replace(self.notes, order=[], steps=[])
        self.phase, self._stack, self.arrived, self._started = Phase.BACKWARD, [PROGRAM], set(), []
        try:
            yield self.notes
        finally:
            self.notes, self.phase, self._stack, self.arrived, self._started = before

    def is_user(self, code: CodeType) -> bool:
        """Whether code is the user's, not torch's or Python's."""
        return self._finder.is_user(code)

    @contextmanager
    def _inside(self, scope: int) -> Iterator[None]:
        self._enter(scope)
        finished = False
        try:
            yield
            finished = True
        finally:
            if not finished and self._failed is None:
                self._failed = scope
            self._stack.pop()
            self.notes.transitions.append((next_sequence_number(), self._stack[-1]))

    def _enter(self, scope: int) -> None:
        self._failed = None
        self._stack.append(scope)
        self.notes.transitions.append((next_sequence_number(), scope))

    def accessed(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        """A module with several names is known by the one it was last reached through."""
        self.names.reached(parent, name, child)

    def _begin(self, module: nn.Module, site: CallSite, inputs: tuple[Any, Any]) -> int:
        number = self._open(site, self._stack[-1])
        self.notes.scopes[number].inputs = self._structure(inputs)
        self.notes.scopes[number].parameters = self._signatures.of(module)
        self.notes.scopes[number].module = module
        return number

    def _open(self, site: CallSite, parent: int) -> int:
        self.notes.scopes.append(Scope(site, parent))
        return len(self.notes.scopes) - 1

    def _describe_result(self, number: int, result: Any) -> None:
        self.notes.scopes[number].outputs = self._structure(result)

    def checkpoint_starts(self, rewinds: bool) -> Callable[[], AbstractContextManager[None]]:
        """A checkpointed region begins here: it is computed again in this call, with those that follow."""
        self.replayer.unfit("a checkpoint runs inside it")
        self.random_states.has_unwound |= not rewinds
        start = Repeat(len(self.notes.scopes), len(self.notes.draws), rewinds)
        return partial(self._recomputing, self._stack[-1], start)

    @contextmanager
    def _recomputing(self, scope: int, start: Repeat) -> Iterator[None]:
        self._repeats.append(replace(start))
        try:
            with self._inside(scope), self.recorder.watching_functions():
                yield
        finally:
            self._repeats.pop()

    def _repeated(self, path: ModulePath) -> int:
        """The forward call that a call in the backward repeats: the next of that path in the checkpointed
        region.

        Modules called in the backward without a checkpoint (by a custom autograd function) repeat their
        first call.
        """
        start = self._repeats[-1].scope if self._repeats else 1
        scopes = self.notes.scopes
        found = next((n for n in range(start, len(scopes)) if scopes[n].site.path == path), None)
        if found is None:
            return self._stack[-1]
        if self._repeats:
            self._repeats[-1].scope = found + 1
        return found

    def _line_that_made(self, tensor: Tensor) -> str | None:
        made = None if (node := self.recorder.node_of(tensor)) is None else self._made_at(node)
        return None if made is None else made.line

    # --- values --------------------------------------------------------------------------------------

    def _structure(self, value: Any) -> Structure:
        self.note_wholes(value)
        leaves, spec = tree_flatten(value)
        return Structure(spec, tuple(self._leaf(leaf) for leaf in leaves))

    def _leaf(self, leaf: Any) -> Named | Constant | Absent:
        if isinstance(leaf, Tensor):
            node = self.note_key(leaf)
            return Absent("a tensor the capture does not know") if node is None else Named(node.name)
        if is_symbolic(leaf) and self.recorder.sizes is not None:
            return Named(self.recorder.sizes.argument(leaf).name)
        if isinstance(leaf, (*SYMBOLIC, *PLAIN)):
            return Constant(number_of(leaf) if isinstance(leaf, SYMBOLIC) else leaf)
        return Absent(f"an object of type {type(leaf).__name__}")

    def note_key(self, tensor: Tensor) -> fx.Node | None:
        """The node that holds `tensor` now, noting where its gradient will be collected."""
        node = self.recorder.node_of(tensor)
        if node is None:
            self.branches.refuse_leaked(tensor)
        elif node not in self.notes.keys and (key := gradient_key(tensor)) is not None:
            self._alive += (tensor, history_of(tensor))
            self.notes.exchange(node, key)
        return node

    def note_wholes(self, value: Any) -> None:
        """As `note_key`, for each tensor in a value that is made of others: its gradient arrives in parts."""
        for whole, tensor, key in keys_of_parts(value):
            node = self.recorder.node_of(tensor)
            if node is not None and node not in self.notes.keys:
                self._alive += (whole, history_of(whole))
                self.notes.exchange(node, key)

    def announce(self, wholes: list[Tensor]) -> None:
        """Tensors that are made of others, whose gradients are outputs of the program."""
        self._wholes.update(map(id, wholes))
        self.note_wholes(wholes)

    def known(self, tensor: Tensor) -> fx.Node:
        """As `met`, noting where its gradient will be collected."""
        node = self.met(tensor)
        self.note_key(tensor)
        return node

    def met(self, tensor: Tensor) -> fx.Node:
        """The node that holds `tensor`; a tensor that no operation has met becomes a constant."""
        node = self.recorder.node_of(tensor)
        if node is not None:
            return node
        self.recorder.recognised(tensor)
        return self.met(tensor)

    def held(self, leaf: Any) -> fx.Node | None:
        """The node that holds a result; None for a constant."""
        if isinstance(leaf, Tensor):
            return self.known(leaf)
        sizes = self.recorder.sizes
        if sizes is None or not is_symbolic(leaf):
            return None
        outermost = (1, None) if len(self.notes.scopes) > 1 else None
        return sizes.argument(leaf, outermost)  # type: ignore[no-any-return]

    def know(self, names: dict[int, str]) -> None:
        """Names for tensors that may turn up: attributes that are neither parameters nor buffers."""
        self._known_tensors = names | self._known_tensors

    # --- operations ----------------------------------------------------------------------------------

    def recorded(self, node: fx.Node) -> None:
        """Mark a node with everything that is only known now."""
        self._interrupts.let_in()
        if node.op != "call_function":
            return
        self.notes.order.append(node)
        if draws(node.target, node.args, node.kwargs):
            self.random_states.drawn(node, self.notes, self._repeats)
        self.notes.marks[node] = self.mark_of(node)
        if node.target is torch.ops.aten.detach.default and inside_backward() and torch.is_grad_enabled():
            self.notes.unpacked.append(node)

    def mark_of(self, node: fx.Node) -> Mark:
        """What is known of a node now that it is recorded."""
        scope = self.notes.scopes[self._stack[-1]]
        source, borrowed = self._finder.in_call(None if self.phase is Phase.BACKWARD else scope.module)
        note_annotations(node)
        return Mark(
            self._stack[-1],
            self.phase,
            next_sequence_number() - 1,
            source,
            self.grad_modes.cut(node, self.notes.hooks) if self.phase is Phase.FORWARD else (),
            self.grad_modes.starts,
            recomputed=self.phase is Phase.BACKWARD and (bool(self._repeats) or self._stack[-1] != PROGRAM),
            hook=self.watch.hook(possible=self.phase is Phase.BACKWARD and source is not None),
            packs=self.watch.packs is not None,
            borrowed=borrowed,
        )

    def size_recorded(self, node: fx.Node) -> None:
        """Mark a node that holds a size: it differentiates nothing, and no autograd node was made for it."""
        self.recorded(node)
        self.notes.marks[node] = replace(self.notes.marks[node], moment=-1, cut=())

    def required(self, condition: str) -> str:
        """What a run says where a condition that the model states does not hold."""
        return f"{condition} does not hold, and torch._check requires it ({self.here()})"

    def stated(self, *, called: bool) -> tuple[bool, str] | None:
        """What a truth has to be where the other side of a branch only raises, and what a run says else."""
        wanted = required(frame_outside(), called=called)
        return (
            None if wanted is None else (wanted, f"the model requires otherwise ({self._finder.current()})")
        )

    def user_of_sizes(self) -> object:
        """The module call in the forward; in the backward, or one that is rehearsed, the autograd node."""
        if self.phase is Phase.FORWARD:
            return self._stack[-1], None
        running = id(self._started[-1][0]) if self._started else len(self.notes.order)
        return self._stack[-1], (id(self.notes), running)

    def met_tensor(self, tensor: Tensor) -> str:
        """Name a tensor that is neither an input nor state of the model."""
        self.branches.refuse_leaked(tensor)
        self.random_states.refuse_use(tensor)
        return self.notes.literal(self._known_tensors.get(id(tensor)), tensor)

    def stops_gradients(self) -> bool:
        """In a region that computes without them in every run."""
        return self.grad_modes.stops

    def composite_opened(self) -> Exception:
        """Its parts are not in the graph."""
        return self.replayer.remembered(CompositeOpened(None, "a composite is opened"))

    def made_of_numbers(self, name: str) -> None:
        """A tensor that the model made of numbers while it ran."""
        self.notes.made.add(name)

    def hook_registered(self, tensor: Tensor, hook: object) -> None:
        """A gradient hook on an activation is part of the backward; one on anything else would stay there."""
        node = self.recorder.node_of(tensor)
        held = None if node is None else self.notes.inputs.get(node)
        if (is_parameter := isinstance(tensor, nn.Parameter)) or held is not None:
            raise hook_kept(described(hook), held or "a parameter", self.here(), is_parameter=is_parameter)
        self.notes.hooks[f"the gradient hook {described(hook)}"] = None

    def requires_set(self, tensor: Tensor, wanted: bool) -> None:
        """Of a tensor from outside a program cannot say it again: autograd looks when it runs."""
        node = self.recorder.node_of(tensor)
        if node is not None and node in self.notes.inputs and tensor.requires_grad != wanted:
            self.notes.hooks[f"requires_grad_({wanted}) on {self.notes.inputs[node]}"] = None

    def layout_read(self, tensor: Tensor) -> None:
        """Python looked at strides: what it decided holds for inputs of this layout only."""
        node = self.recorder.node_of(tensor)
        if node is not None:
            self.notes.layouts_read.append(node)

    def distrusted(self, reason: str) -> None:
        """The model does something that is another thing where calls are replayed."""
        self.replayer.distrust(reason)

    def told(self) -> bool | None:
        """What code is told that asks whether it is being compiled; None for code that does not count."""
        source = self._finder.asked()
        return None if source is None else self.answers.to(source)

    # --- autograd ------------------------------------------------------------------------------------

    def node_starts(self, node: Node, received: Sequence[Tensor | None]) -> None:
        """An autograd node begins: what is recorded until it ends is its backward."""
        self._started.append((node, len(self.notes.order), self._nodes(in_parts((), received)[1])))

    def node_ends(self, node: Node, produced: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """An autograd node has ended: note what it hands on, edge by edge."""
        edges, (_, start, received) = keys_out(node), self._started.pop()
        produced = as_eager_takes_it(self.recorder, node, (self.notes.order, start), produced)
        if self.own_gradients:
            produced = as_own_nodes(self.recorder, self.notes, edges, start, produced)
        keys, plain = in_parts(edges, produced)
        handed = self._nodes(plain)
        scopes, self.replayer.handed_on, end = self.replayer.handed_on, None, len(self.notes.order)
        self.notes.steps.append(AutogradStep(node, start, end, received, handed, keys, scopes))
        self.arrived.update(key for key, value in zip(keys, handed, strict=False) if key and value)
        return produced

    def _nodes(self, tensors: Sequence[Tensor | None]) -> tuple[fx.Node | None, ...]:
        return tuple(None if tensor is None else self.recorder.node_of(tensor) for tensor in tensors)

    # --- afterwards ----------------------------------------------------------------------------------

    def forget(self) -> dict[fx.Node, type]:
        """Let go of every tensor of the run; what replayed calls computed, with the class they were of."""
        replayed = self.replayer.inside_templates()
        self._alive.clear()
        release_scans(step.node for step in self.notes.steps)
        self.notes.steps.clear()
        self.replayer.forget()
        self.branches.forget()
        self.recorder.forget()
        return replayed

    # --- errors --------------------------------------------------------------------------------------

    @contextmanager
    def blaming(self, name: str) -> Iterator[None]:
        """An error of the model stays the model's own; a note says that a capture was running, and where."""
        with CaptureNoting(name, self.here_failed, self.answers):
            try:
                yield
            except RuntimeError as error:
                if (refused := refused_size(error, self.here_failed(error))) is None:
                    raise
                raise refused from error

    def here(self) -> Place:
        """The module that is running and the user's line."""
        return self._place(self._stack[-1], self._finder.current())

    def reading(self) -> tuple[ModulePath | None, Source | None]:
        """The module that is running now, and the user's line."""
        scope = self._stack[-1]
        path = None if scope == PROGRAM else self.notes.scopes[scope].site.path
        return path, self._finder.current()

    def _place(self, scope: int, source: Source | None) -> Place:
        """A call and a line; no call for code outside any module."""
        module = None if scope == PROGRAM else str(self.notes.scopes[scope].site)
        return Place(module, str(source) if source else None)

    def here_failed(self, error: BaseException) -> Place:
        """The module whose call raised `error` and the innermost line of user code it passed through."""
        scope = self._stack[-1] if self._failed is None else self._failed
        return self._place(scope, self._finder.raised_at(error))

    def value_needed(self, operation: object, arguments: Sequence[Any], function: object) -> CaptureError:
        """The error for a Python decision that needs a tensor's value."""
        nodes = filter(None, map(self.recorder.node_of, tensors_read(arguments)))
        values = [value_of(node, self._made_at(node), self.notes.inputs) for node in nodes]
        return data_dependent(operation, function, values, self.here())

    def _made_at(self, node: fx.Node) -> Place:
        mark = self.notes.marks.get(node)
        return Place() if mark is None else self._place(mark.scope, mark.source)

    def data_replaced(self, why: str) -> UnsupportedMutation:
        """The error for `tensor.data = …` that a program could not repeat."""
        return data_replaced(why, self.here())

    def object_met(self, operation: object, met: object) -> CaptureError:
        """The error for an operation that is given a generator of its own, or another object."""
        return object_met(operation, met, self.here())

    def composed_met(self, tensor: Tensor) -> None:
        """One from outside that requires a gradient would get none: raises `UnsupportedInput`."""
        self.notes.composed = True
        self.replayer.distrust(COMPOSED)
        differentiated = torch.is_grad_enabled() and self.phase is Phase.FORWARD
        if differentiated and id(tensor) not in self._wholes:
            refuse_lost_gradient(tensor, self.here)


def _ignore(_result: Any) -> None:
    """The call of a module that has no name in the model: its operations belong to the caller."""
