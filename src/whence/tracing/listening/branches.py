"""Operators that run functions: each function is recorded once, where the model calls the operator.

There the function still closes over what it reads, and nodes can be marked with the module and the line that
run. PyTorch's rules for such operators run the recorded graph again, below autograd and to differentiate it:
what comes of a node then has the origin of that node. What autograd adds has none of its own, and is given to
the call that runs the operator when all is over.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.autograd.nodes import (
    derivative_of_its_own,
    made_since,
    next_sequence_number,
    sequence_number,
)
from whence._torch.graphs import graph_module
from whence._torch.higher_order.closure_conversion import (
    BranchRecorder,
    Closed,
    form_of,
    record_loop,
    undifferentiated,
)
from whence._torch.higher_order.function_graphs import (
    Played,
    indexes_for_attention,
    is_transformed,
    let_play,
    let_values_go,
    played,
    recording_paused,
)
from whence._torch.operators.schemas import HigherOrderOperator, brings_derivative, draws, op_name
from whence._torch.pytrees import TreeSpec, tree_flatten, tree_unflatten
from whence._torch.record.annotations import annotate_like
from whence._torch.record.listener import ModelListener
from whence._torch.record.recorder import Recorder
from whence._torch.sizes.symbols import SYMBOLIC, OuterNumber
from whence.errors import Place, UnsupportedMutation, UnsupportedOperator, WhenceError
from whence.program.node_records import has_origin, origin_of, set_origin
from whence.provenance import Origin
from whence.provenance.places import PROGRAM
from whence.rewriting.aliases import memory_of
from whence.rewriting.cut_gradients import cut_gradients
from whence.rewriting.functionalize import Functional, functionalize
from whence.rewriting.simplify import drop_unused, order_placeholders
from whence.schema import Phase
from whence.tracing.listening.run_state import RunState
from whence.tracing.log.events import Marked
from whence.tracing.log.log import ran_without

_OF_TORCH = (RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError)
"""What PyTorch's rules raise where they refuse."""
_AS_COMPILED = "call it as torch.compile would accept it, or write the branch or loop in Python"
_WRITE_OUTSIDE = "write to a copy, return the new value and write it outside"


class Branches:
    """Records the functions that operators run.

    `recorder` is the one at work, `retraces` says whether it runs what was recorded before. `differentiates`
    says whether a backward is recorded, too.
    """

    def __init__(self, state: RunState, *, differentiates: bool) -> None:
        self._state = state
        self._differentiates = differentiates
        self._active: list[Recorder] = []
        self._over: list[BranchRun] = []
        self._played: list[fx.Node] = []
        self._traced: list[fx.GraphModule] = []
        self.retraces = False

    @property
    def recorder(self) -> Recorder:
        """The recording at work."""
        return self._active[-1]

    @property
    def are_recorded(self) -> bool:
        """Whether a function is being recorded."""
        return len(self._active) > 1

    # --- what a recording tells -----------------------------------------------------------------------

    def called(self, operator: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator with functions that close over nothing; they are recorded on the way."""
        self._state.objections.unfit(f"{operator.name()} runs functions inside it")
        form = form_of(operator)
        functions = [value for value in tree_flatten((args, kwargs))[0] if _is_callable_constant(value)]
        known = all(played(function) for function in functions)
        if is_transformed():
            raise self.refused(operator, "a transform of torch.func runs it")
        if form is None and functions and not known:
            raise self.refused(operator, "it runs functions, and on which examples is not known")
        if form is None or known:
            return self._run(operator, args, kwargs)
        call = form(_ClosureConversion(self, operator), *args, **kwargs)
        return call.whole(self._run(operator, call.args, {}))

    def _run(self, operator: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives. Without a backward, and inside a function, it is recorded as it is: whoever
        differentiates that finds its derivative there."""
        call: Any = operator
        try:
            if self.retraces or (self._differentiates and not self.are_recorded):
                self._refuse_derivative(operator, args)
                return call(*args, **kwargs)
            operands = tree_flatten((args, kwargs))[0]
            return undifferentiated(lambda: call(*args, **kwargs), operands, self._asked_for)
        except WhenceError:
            raise
        except _OF_TORCH as error:
            raise self.refused(operator, str(error)) from error

    def _refuse_derivative(self, operator: HigherOrderOperator, args: tuple[Any, ...]) -> None:
        """Raise for an operator whose derivative PyTorch cannot write down, if it is wanted."""
        name = operator.name()
        if not torch.is_grad_enabled():
            return
        if name == "while_loop" and _wanted(args):
            why = "its backward would keep a value of each round, and how many there are is not known"
            raise self.refused(operator, why)
        if name == "flex_attention" and _wanted(args[7:]):
            why = "its backward, run as a graph, gives no gradient for tensors that score_mod reads"
            raise self.refused(operator, why)

    def _asked_for(self) -> UnsupportedOperator:
        return self._refused(
            "the gradient of an operator that runs functions",
            "the model asks for it in its forward, or in such a function",
        )

    def rule_for(self, operator: HigherOrderOperator) -> Callable[..., Any] | None:
        """What records an operator in the place of PyTorch's own rule."""
        return record_loop if operator.name() == "while_loop" else None

    def traced(self, function: Any, args: tuple[Any, ...]) -> fx.GraphModule:
        """The graph of a function that one of PyTorch's rules runs."""
        listener = Listener(self._state, self, self.recorder, sees=False)
        recorder = BranchRecorder(listener, self.recorder)
        for name, value in zip(_names(function, len(args)), args, strict=True):
            recorder.argument(value, name)
        run = Played(function, self.playing) if isinstance(function, fx.GraphModule) else function
        before, self.retraces = self.retraces, True
        try:
            with self.recording(recorder):
                leaves, spec = tree_flatten(run(*args))
        finally:
            self.retraces = before
        nodes = [recorder.node_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if listener.outside:
            raise self._refused("what PyTorch makes of it", "it reads tensors from outside")
        with recording_paused():
            functional = functionalize(recorder.graph, recorder.sizes)
            final = [functional.final(node) if isinstance(node, fx.Node) else node for node in nodes]
        module = _finished_branch(recorder, tree_unflatten(final, spec))
        let_play(module, self.playing)
        self._traced.append(module)
        return module

    def refused(self, operator: Any, why: str, remedy: str = _AS_COMPILED) -> UnsupportedOperator:
        """The error for an operator that cannot be recorded."""
        return self._refused(op_name(operator), why, remedy=remedy)

    def composed(self, operator: Any, tensor: Tensor) -> UnsupportedOperator:
        """The error for an operator on a tensor that is made of others."""
        return self._refused(op_name(operator), f"it is given a {type(tensor).__name__}, made of others")

    def _refused(
        self, name: str, why: str, where: Place | None = None, remedy: str = _AS_COMPILED
    ) -> UnsupportedOperator:
        return UnsupportedOperator(
            f"{name} cannot be recorded", where=where or self._state.places.here(), why=why, remedy=remedy
        )

    def refuse_leaked(self, tensor: Tensor) -> None:
        """Raise `UnsupportedOperator` for a tensor that a function left behind for others to read."""
        found = next((seen for seen in self._over if seen.made(tensor)), None)
        if found is not None:
            why = "a function that it runs keeps a tensor, which outside of it has no value"
            raise self._refused(op_name(found.operator), why, found.where)

    def forget(self) -> None:
        """Let go of every tensor of the functions that ran."""
        self._over.clear()
        let_values_go(self._traced)

    # --- recording ------------------------------------------------------------------------------------

    @contextmanager
    def playing(self, node: fx.Node) -> Iterator[None]:
        """A node of a graph that was recorded runs again."""
        self._played.append(node)
        try:
            yield
        finally:
            self._played.pop()

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Record with this one inside the block."""
        self._active.append(recorder)
        try:
            with recorder.active():
                yield
        finally:
            self._active.pop()

    def origin(self) -> Origin | None:
        """Where a node comes from that is recorded while another one runs again."""
        if not self._played or not has_origin(self._played[-1]):
            return None
        origin = origin_of(self._played[-1])
        if self._state.running.phase is Phase.BACKWARD and origin.phase is Phase.FORWARD:
            return origin._replace(phase=Phase.BACKWARD, recomputed=True)
        return origin

    @property
    def playing_now(self) -> fx.Node | None:
        """The node of a recorded graph that runs again."""
        return self._played[-1] if self._played else None

    def seen(self, operator: HigherOrderOperator, function: Any, examples: Sequence[Any]) -> "BranchRun":
        """Run a function of the model on examples, and record it."""
        listener = Listener(self._state, self, self.recorder, sees=True)
        recorder = BranchRecorder(listener, self.recorder)
        args = [recorder.example(value) for value in examples]
        nodes = [recorder.argument(value, f"arg_{at}") for at, value in enumerate(args)]
        moment = next_sequence_number()
        with self.recording(recorder):
            leaves, spec = tree_flatten(function(*args))
        seen = BranchRun(
            operator, self._state.places.here(), recorder, listener, tuple(args), nodes, leaves, spec
        )
        self._over.append(seen)
        return replace(seen, known=self._known_functions(moment, seen))

    def _known_functions(self, moment: int, seen: "BranchRun") -> frozenset[int]:
        """The moments of operators that run functions themselves, and bring their derivative along.

        A custom autograd function is differentiated by Python code that no graph contains: it is refused.
        """
        found = set()
        makers: dict[int, fx.Node] = {}
        for node, mark in seen.listener.marks.items():
            makers.setdefault(mark.moment, node)
        for made in made_since(moment, [leaf for leaf in seen.leaves if isinstance(leaf, Tensor)]):
            maker = makers.get(sequence_number(made) or -1)
            target = None if maker is None else maker.target
            known = target is not None and brings_derivative(target)
            if known:
                found.add(sequence_number(made) or -1)
            elif (name := derivative_of_its_own(made)) and not indexes_for_attention(made):
                why = f"its derivative would not be that of {name}"
                raise self.refused(seen.operator, why)
        return frozenset(found)


@dataclass
class Listener:
    """Hears what a function records, as `Operations` does.

    `outside` are the tensors that the function reads and was not given, with their placeholders' names.
    """

    run: RunState
    branches: Branches
    around: Recorder
    sees: bool
    marks: dict[fx.Node, Marked] = field(default_factory=dict)
    outside: dict[str, Tensor] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)

    def recorded(self, node: fx.Node, of: fx.Node | None = None) -> None:  # noqa: ARG002
        """Say of a node where it comes from, if that is known now."""
        if node.op != "call_function":
            return
        origin = self.branches.origin()
        if self.sees and self.branches.playing_now is None:
            origin = self._marked(node)
        else:
            annotate_like(node, self.branches.playing_now)
        if origin is not None:
            set_origin(node, origin)

    size_recorded = recorded

    @property
    def model(self) -> ModelListener:
        """Who hears what the model does beside its operations: the same as around the function."""
        return self.around.listener.model

    def _marked(self, node: fx.Node) -> Origin:
        mark = self.marks[node] = self.run.marking.of(node)
        if draws(node.target, node.args, node.kwargs):
            self.run.random_states.drew()
            if mark.recomputed:
                why = f"{op_name(node.target)} in a checkpoint would draw other numbers the second time"
                raise self.branches.refused(node.target, why)
        site = None if mark.scope == PROGRAM else self.run.log.scopes[mark.scope].site
        calls = () if site is None else (site,)
        return Origin(mark.phase, calls, mark.quality, mark.source, None, site, mark.recomputed, mark.hook)

    def user_of_sizes(self) -> object:
        """The function: what it computes of sizes is its own."""
        return id(self)

    def met_tensor(self, tensor: Tensor) -> str:
        """A tensor from outside; it will be handed to the function."""
        self.branches.refuse_leaked(tensor)
        known = self.around.node_of(tensor)
        name = f"outside_{len(self.outside)}" if known is None or known.name in self.outside else known.name
        self.outside[name] = tensor
        return name

    def made_of_numbers(self, name: str) -> None:
        """A tensor that the function made of numbers."""
        self.numbers.add(name)

    def hook_registered(self, _tensor: Tensor, _hook: object) -> None:
        """A hook in a function would be run by nobody."""
        raise self.branches.refused("register_hook", "a hook in a function that an operator runs is lost")


@dataclass(frozen=True)
class BranchRun:
    """A function that an operator has run, and where: its recording, what it was given and returned.

    `known` are the moments of autograd functions in it that bring their derivative along."""

    operator: HigherOrderOperator
    where: Place
    recorder: BranchRecorder
    listener: Listener
    args: tuple[Any, ...]
    nodes: Sequence[fx.Node]
    leaves: Sequence[Any]
    spec: TreeSpec
    known: frozenset[int] = frozenset()

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor has a value in this run of the function only."""
        given = any(tensor is known for known in self.listener.outside.values())
        return not given and self.recorder.node_of(tensor) is not None


@dataclass(frozen=True)
class _ClosureConversion:
    """Closes the functions of one call of an operator."""

    branches: Branches
    operator: HigherOrderOperator

    def __call__(self, functions: tuple[Any, ...], examples: Sequence[Any], *, lone: bool = False) -> Closed:
        """Functions that take what they read; `lone` ones return one tensor, and may return an argument."""
        seen = [self.branches.seen(self.operator, function, examples) for function in functions]
        spec = seen[0].spec
        if any(other.spec != spec for other in seen):
            raise self._refused(f"its functions return different structures: {[s.spec for s in seen]}")
        for each in seen:
            self._recognise(each)
        constants = {} if lone else self._constants(seen)
        outside = self._outside(seen)
        with recording_paused():
            graphs = [self._graph(each, outside, constants, lone=lone) for each in seen]
        closed = tuple(Played(graph, self.branches.playing) for graph in graphs)
        return Closed(closed, tuple(tensor for tensor, _ in outside.values()), spec, constants)

    def _refused(self, why: str) -> UnsupportedOperator:
        return self.branches.refused(self.operator, why)

    def _recognise(self, seen: BranchRun) -> None:
        """Let what a function returns as it found it be known by a placeholder."""
        for leaf in seen.leaves:
            if isinstance(leaf, Tensor) and seen.recorder.node_of(leaf) is None:
                seen.recorder.recognised(leaf)

    def _shares(self, seen: BranchRun) -> bool:
        """Whether a result is memory of an argument, or of another result."""
        nodes = seen.recorder.graph.nodes
        memory, taken = memory_of(nodes), {node for node in nodes if node.op == "placeholder"}
        results = (seen.recorder.node_of(leaf) for leaf in seen.leaves if isinstance(leaf, Tensor))
        looked_into = [memory(node) for node in results if node is not None]
        return len(set(looked_into)) < len(looked_into) or not taken.isdisjoint(looked_into)

    def _constants(self, seen: Sequence[BranchRun]) -> dict[int, Any]:
        """The leaves of results that are no tensors, by position; all functions must return the same."""
        found: dict[int, Any] = {}
        for at, values in enumerate(zip(*(each.leaves for each in seen), strict=True)):
            if all(isinstance(value, Tensor) for value in values):
                continue
            first = values[0]
            if not all(_is_same_constant(value, first) for value in values):
                told = " or ".join(map(_constant_in_words, values))
                why = f"its functions return {told}: what is no tensor must be the same in each"
                raise self.branches.refused(self.operator, why, "return a tensor that holds the number")
            found[at] = first
        return found

    def _outside(self, seen: Sequence[BranchRun]) -> dict[int, tuple[Tensor, fx.Node]]:
        """The tensors from outside that functions read, each with a placeholder of one of them."""
        found: dict[int, tuple[Tensor, fx.Node]] = {}
        for each in seen:
            placeholders = {
                node.target: node for node in each.recorder.graph.nodes if node.op == "placeholder"
            }
            for name, tensor in each.listener.outside.items():
                found.setdefault(id(tensor), (tensor, placeholders[name]))
                if name in each.listener.numbers:
                    self._know_numbers(tensor)
        return found

    def _know_numbers(self, literal: Tensor) -> None:
        """What a function makes of numbers is made anew by each run of the model."""
        around = self.branches.recorder
        if around.node_of(literal) is None:
            node = around.adopt(literal, around.listener.met_tensor(literal))
            around.listener.made_of_numbers(node.name)

    def _graph(
        self,
        seen: BranchRun,
        outside: dict[int, tuple[Tensor, fx.Node]],
        constants: dict[int, Any],
        *,
        lone: bool,
    ) -> fx.GraphModule:
        recorder = seen.recorder
        read = [
            node if (node := recorder.node_of(tensor)) is not None else recorder.unread(like)
            for tensor, like in outside.values()
        ]
        if any(isinstance(leaf, SYMBOLIC) for leaf in seen.leaves):
            raise OuterNumber
        nodes = [recorder.node_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in seen.leaves]
        shares = not lone and self._shares(seen)
        functional = functionalize(recorder.graph, recorder.sizes)
        self._refuse_writes(seen, functional)
        if shares:
            raise self._refused("a function returns what it was given, or a part of it: return a clone")
        final = [functional.final(node) if isinstance(node, fx.Node) else node for node in nodes]
        stops = ran_without(seen.listener.marks, seen.known)
        if cut_gradients(functional, stops, open_inputs={*functional.graph.find_nodes(op="placeholder")}):
            raise self._refused("a function writes in place without gradients to what has one")
        order = [node.name for node in (*seen.nodes, *read)]
        returned = final[0] if lone else tuple(x for at, x in enumerate(final) if at not in constants)
        module = _finished_branch(recorder, returned)
        order_placeholders(module.graph, order)
        return module

    def _refuse_writes(self, seen: BranchRun, functional: Functional) -> None:
        if any(node.op == "placeholder" for node in functional.history):
            raise UnsupportedMutation(
                f"a function that {op_name(self.operator)} runs writes to a value from outside",
                where=seen.where,
                why="it runs any number of times, or not at all, and nothing in a program changes its input",
                remedy=_WRITE_OUTSIDE,
            )


def _finished_branch(recorder: BranchRecorder, returned: Any) -> fx.GraphModule:
    graph = recorder.graph
    graph.output(returned)
    drop_unused(
        graph, recorder.nested, set(), {node.name for node in graph.nodes if node.op == "placeholder"}
    )
    return graph_module(recorder.nested, graph, "Branch")


def _wanted(operands: Any) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in tree_flatten(operands)[0])


def _is_callable_constant(value: Any) -> bool:
    return callable(value) and not isinstance(value, (Tensor, torch.dtype, *SYMBOLIC))


def _names(function: Any, count: int) -> list[str]:
    """What the arguments of a function are called: as when it was recorded, where it was."""
    known = played(function)
    names = [] if known is None else [n.name for n in known.module.graph.nodes if n.op == "placeholder"]
    return names if len(names) == count else [f"arg_{at}" for at in range(count)]


def _is_same_constant(value: Any, other: Any) -> bool:
    """Whether two constants are of one type, and equal; numbers that follow from sizes are none."""
    return not isinstance(value, (Tensor, *SYMBOLIC)) and type(value) is type(other) and value == other


def _constant_in_words(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)
