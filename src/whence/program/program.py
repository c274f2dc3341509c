"""A captured program and the questions that only need it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Self

from torch import Tensor, fx

from whence._torch.graphs import all_nodes
from whence._torch.pytrees import TreeSpec
from whence.errors import SelectionError
from whence.program.arguments.convention import Convention
from whence.program.arguments.fitting import ModeQuery
from whence.program.arguments.optimizer_arguments import Step
from whence.program.calls import Call, Calls, Structure
from whence.program.guards.guards import Guards
from whence.program.layers import Layers, layers_of
from whence.program.node_records import GraphFacts, constant_origin, facts_in, origin_of
from whence.program.queries.decisions import DecisionByValue, decisions_in
from whence.program.queries.history import History
from whence.program.queries.notebook import OpensInNotebook
from whence.program.queries.printing import page
from whence.program.queries.selecting import find_input, find_output, select
from whence.program.queries.shapes import Shapes, shapes_of
from whence.program.replay import Replays
from whence.program.signature import Draw, Input, Output, Signature
from whence.provenance import ModulePath, Origin, Source
from whence.schema import InputKind


@dataclass(frozen=True)
class ModuleRecord:
    """One name in the module hierarchy of the captured model, in the model's own order.

    `parameters` and `buffers` give the attribute name and the name of the program input that holds it (None
    for an attribute that is None). `same_as` is the first path of a module that has several. `children` are
    the names of submodules in order, `absent` those among them that are None.
    """

    path: ModulePath
    type: str
    container: str | None
    training: bool
    parameters: tuple[tuple[str, str | None], ...] = ()
    buffers: tuple[tuple[str, str | None, bool], ...] = ()
    absent: tuple[str, ...] = ()
    same_as: ModulePath | None = None
    tensors: tuple[tuple[str, str], ...] = ()
    children: tuple[str, ...] = ()


@dataclass(frozen=True)
class Circumstances:
    """What a capture was asked for, and under what it ran.

    `dynamic_shapes` are the sizes that may vary, `preserve_calls` the modules that keep their calling
    convention (patterns of paths), and `strict` says that PyTorch's front end was to read the code: enough to
    capture again in the same way. `loss_function` made the scalar whose backward a joint program holds.
    `autocast` gives the dtype of every device type that autocast was on for. `asked` are the lines where the
    model asked whether it is being compiled: there it may have done something else than it does in eager
    mode. `opaque` lists custom autograd functions that a forward-only program passes through: it cannot be
    differentiated from outside. `is_foreign` marks a graph that others made (`attach`): of its operations the
    origin may not be known. `decide` says whose values decide where the model lets values decide. `variants`
    says that programs were to be kept for sizes that a branch excludes, which are `numbers` in such a one.
    `device` is the one that the program was captured for, where that was not the model's own, and `presumed`
    says what was taken for granted of it that only the device can tell. `modes` are those of torch that the
    model asked for: the program is what it does where they are so, and `dtype_asked` is the first line where
    it asked a tensor for its dtype. Of state that is `differentiated` the model asks autograd for gradients
    while it runs. Where composites are `taken_apart`, they are so as in the grad mode of
    the capture. `replay` says which calls were not run, because they had to do what an equal one did.
    `unread` is a graph of what the model runs and no result needs, on inputs that it reads: a program does
    not run it, and knows what it takes. `held` says of values, also of those, which variables of Python hold
    longer than anybody reads them: the first and the last operation that runs meanwhile.
    """

    dynamic_shapes: Any = None
    preserve_calls: tuple[str, ...] = ()
    strict: bool = False
    has_backward: bool = False
    loss_function: Callable[[Any], Tensor] | None = None
    autocast: tuple[tuple[str, str], ...] = ()
    asked: tuple[Source, ...] = ()
    opaque: tuple[str, ...] = ()
    is_foreign: bool = False
    decide: str | None = None
    variants: bool = False
    numbers: tuple[tuple[str, int], ...] = ()
    device: str | None = None
    presumed: tuple[str, ...] = ()
    modes: tuple[ModeQuery, ...] = ()
    replay: Replays = field(default_factory=Replays)
    dtype_asked: str = ""
    differentiated: tuple[str, ...] = ()
    taken_apart: bool = True
    unread: fx.GraphModule | None = field(default=None, repr=False, compare=False)
    held: Mapping[str, tuple[str, str]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False, repr=False)
class FlatProgram(OpensInNotebook):
    """One flat functional graph, its signature, origins, calls, and the tensors of the model it was
    captured from: what every room is given. `whence.Program` is this, with what rooms above answer.

    What each node is lies on the node (`node_records`), and `facts` says it of all of them. `result` is the
    structure of what the captured callable returns. `modules` are the names of the model's hierarchy. `state`
    maps names of inputs to the model's own tensors, with those that are made of several inputs under names of
    their own. `guards` is what the capture assumed. `step` is there for a program of a whole training step:
    what it needs of the optimizer. `circumstances` are what the capture was asked for, and under what it ran.
    `history` has an entry for each pass since then, in order. `variants` are programs for sizes that a branch
    of the model excludes, if they were asked for: what it computes there, with these sizes as numbers.
    """

    graph_module: fx.GraphModule
    signature: Signature
    calls: Calls
    convention: Convention
    result: Structure
    modules: tuple[ModuleRecord, ...]
    state: Mapping[str, Tensor]
    guards: Guards = field(default_factory=Guards)
    step: Step | None = None
    circumstances: Circumstances = field(default_factory=Circumstances)
    history: History = field(default_factory=History)
    variants: tuple["FlatProgram", ...] = ()

    def __post_init__(self) -> None:
        if self.signature.graph_module is not self.graph_module:
            signature = replace(self.signature, graph_module=self.graph_module)
            object.__setattr__(self, "signature", signature)

    @property
    def name(self) -> str:
        """The class of the captured model, or the name of the captured function."""
        return self.calls.program.site.type

    @cached_property
    def facts(self) -> GraphFacts:
        """What the records of the nodes say together."""
        return facts_in(self.graph)

    @property
    def has_backward(self) -> bool:
        """Whether the graph holds a backward pass."""
        return self.circumstances.has_backward

    @property
    def loss_function(self) -> Callable[[Any], Tensor] | None:
        """What made a scalar of the outputs, whose backward the graph holds."""
        return self.circumstances.loss_function

    @property
    def asked(self) -> tuple[Source, ...]:
        """The lines where the model asked whether it is being compiled."""
        return self.circumstances.asked

    @property
    def device(self) -> str | None:
        """The device that the program was captured for, where that was not its tensors' own."""
        return self.circumstances.device

    @property
    def presumed(self) -> tuple[str, ...]:
        """What was taken for granted of that device, which only the device can tell."""
        return self.circumstances.presumed

    @property
    def replay(self) -> Replays:
        """Which calls were not run, because they had to do what an equal one did."""
        return self.circumstances.replay

    @property
    def graph(self) -> fx.Graph:
        """The flat graph."""
        return self.graph_module.graph

    @property
    def out_spec(self) -> TreeSpec:
        """The structure of what the captured callable returns."""
        return self.result.spec

    def nodes(self) -> Iterator[fx.Node]:
        """Every node of every nested graph, in order."""
        return all_nodes(self.graph_module)

    @cached_property
    def _by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    def node(self, name: str) -> fx.Node:
        """The node of that name; raises `SelectionError` with near misses."""
        found = self._by_name.get(name)
        if found is None:
            found = {node.name: node for node in self.graph.nodes}.get(name)
        if found is None:
            raise SelectionError(f"no node is called {name!r}", remedy=_suggestion(name, self._by_name))
        return found

    def where(self, node: fx.Node | str) -> Origin:
        """Where a node came from; raises `SelectionError` for a name that is not in the graph.

        A constant came from where it is first read: its origin is `inferred`.
        """
        found = self.node(node) if isinstance(node, str) else node
        return constant_origin(found) if found.name in self._constants else origin_of(found)

    @cached_property
    def _constants(self) -> frozenset[str]:
        rows = self.signature.state
        return frozenset(row.name for row in rows if row.kind is InputKind.CONSTANT)

    def input(self, name: str) -> Input:
        """The input with this placeholder name, fully qualified name, alias or pytree path."""
        return find_input(self.signature, name)

    def output(self, name: str) -> Output:
        """The output with this name or path, or the only one that belongs to the input of that name."""
        return find_output(self.signature, name)

    def select(self, pattern: str) -> list[fx.Node]:
        """The nodes that fit `path :: operation :: phase`, each part a glob and each but one optional.

        A path fits a node when it fits the call that made the node or any module above it, so
        `layers.*.self_attn` includes what its projections do. `lin@1` is the second call of a module alone,
        and `type=Linear` stands for all modules of a class. `region=attention` is what ran in a `with
        whence.region("attention")`, and any `key=text` what `torch.fx.traceback.annotate` says so of.
        In the place of a phase stand `loss`, `recomputed`, `saved` (read by the backward) and `random`, and
        in that of an operation a kind of inputs: `layers.* :: kind=parameter`.
        Raises `SelectionError` when nothing fits.
        """
        return select(self, pattern)

    def call_of(self, node: fx.Node) -> Call:
        """The call whose graph holds the node; the program itself for nodes outside any module."""
        return self.calls.rows[self.calls.number(origin_of(node).place)]

    def layers(self) -> tuple[Layers, ...]:
        """The calls that compute the same, in groups of two or more, with their nodes matched.

        Calls are equal when their forwards and backwards agree node for node, and in what they take from
        outside and hand out; which weights they read may differ. Groups that follow from others are left
        out: one attention in each of 32 equal layers.
        """
        return layers_of(self)

    @property
    def decisions(self) -> tuple[DecisionByValue, ...]:
        """What values of tensors decided at the capture: a run whose values decide otherwise raises."""
        return decisions_in(self.graph.nodes)

    @property
    def draws(self) -> tuple[Draw, ...]:
        """The operations that draw random numbers, as the signature has them."""
        return self.signature.draws

    @property
    def shapes(self) -> Shapes:
        """The shape of every input and output, with the names of sizes that vary and who constrained them."""
        return shapes_of(self)

    def with_changes(self, **changes: Any) -> Self:
        """A program that differs in these fields."""
        return replace(self, **changes)

    def under(self, **changes: Any) -> Self:
        """A program that differs in these circumstances, it and its variants."""
        variants = tuple(each.under(**changes) for each in self.variants)
        return self.with_changes(circumstances=replace(self.circumstances, **changes), variants=variants)

    def __str__(self) -> str:
        return page(self)

    def __repr__(self) -> str:
        phases = "forward and backward" if self.has_backward else "forward"
        phases = phases if self.step is None else "forward, backward and optimizer"
        more = f", {len(self.variants)} variant(s)" if self.variants else ""
        return f"<Program of {self.name}: {len(self.graph.nodes):,} nodes, {phases}{more}>"


def _suggestion(name: str, candidates: Mapping[str, object]) -> str:
    close = get_close_matches(name, list(candidates), n=3)
    return f"did you mean {', '.join(close)}?" if close else ""
