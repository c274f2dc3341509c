"""A graph that others made becomes a Program, step by step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.export.descriptors import joint_parts, names_of_state, returned_structure
from whence._torch.export.lowering import WITHOUT_GRAD
from whence._torch.export.programs import fakes_like
from whence._torch.graphs import graph_module, placeholder
from whence._torch.operators.schemas import reads_memory
from whence._torch.pytrees import TreeSpec, tree_flatten
from whence._torch.record.annotations import said_of
from whence.errors import Fault, UnsupportedGraph
from whence.interop.attached.arguments import Arguments, arguments_of, open_sizes
from whence.interop.attached.attribution import Modules, Phases, calls_of, phases_of, write_origins
from whence.interop.attached.roles import GraphWords, Result, Slot, Told, told
from whence.interop.exported.call_boundaries import with_structures
from whence.interop.exported.read import functional_form
from whence.interop.exported.signature import result_of, user_outputs
from whence.interop.graphs.call_sites import ROOT_MODULE, Sites
from whence.interop.graphs.decompose_composites import without_hidden_writes
from whence.interop.graphs.faults import refusal
from whence.interop.graphs.frames import spelling_of
from whence.interop.graphs.inline import Flat, flattened
from whence.interop.graphs.lift_state import ATTRIBUTE, readied
from whence.program import Circumstances, FlatProgram, GraphFacts, Input, Output, Signature, Structure
from whence.program.arguments.open_sizes import Sizes
from whence.program.names import state_name
from whence.program.node_records import origin_of, set_origin, write_facts
from whence.program.wellformed import check
from whence.provenance import ROOT, ModulePath, Origin
from whence.rewriting.cut_gradients import cut_gradients
from whence.rewriting.functionalize import Functional
from whence.schema import InputKind, OutputKind, Phase, Quality
from whence.tracing.target.subject import StateTensor, Subject, module_records, subject_of

_NO_SEED = "the graph returns gradients, and it is not known where its backward begins"
_SEED = "a backward begins with the seed of its loss, `ones_like`, or with tangents"


def attach(graph: object, model: Any, words: GraphWords) -> FlatProgram:
    """The program of a graph, over the model's own tensors; raises `UnsupportedGraph` with every fault."""
    module, spec = joint_parts(graph) or _graph_itself(graph)
    subject = subject_of(model)
    state = subject.state
    ready = readied(module)
    found, structure = _roles_of_graph(ready, state, replace(words, names=names_of_state(module)), spec)
    arguments = arguments_of(words, found.slots, subject)
    _refuse_graph(ready, [*found.faults, *arguments.faults, *_kind_faults(ready)])
    sizes, faults = open_sizes(ready, arguments.leaves)
    _refuse_graph(ready, faults)
    inputs = _Inputs(fx.Graph(), subject, state, found.slots, arguments)
    flat = _flat_of_graph(ready, inputs)
    pairs = zip(flat.returned, found.results, strict=True)
    results = [Result(value, row.kind, row.of) for value, row in pairs]
    nodes = flat.operations
    phases = phases_of(nodes, inputs.tangents, next(_result_nodes(results, OutputKind.LOSS), None))
    if not inputs.tangents and phases.seed is None and any(_result_nodes(results, OutputKind.GRADIENT)):
        raise UnsupportedGraph(
            _NO_SEED, why=_SEED, remedy="differentiate the value that is returned as the loss"
        )
    sites = _attributed(nodes, phases, subject, inputs)
    results = _summed(flat.graph, results, inputs)
    functional = functional_form(flat)
    program = _program_of_graph(
        _AttachedParts(inputs, flat, functional, sites, phases, results, structure), sizes
    )
    check(program)
    return program


def _graph_itself(graph: object) -> tuple[fx.GraphModule, TreeSpec | None]:
    if not isinstance(graph, fx.GraphModule):
        raise UnsupportedGraph(
            f"expected a torch.fx.GraphModule or a JointWithDescriptors, got {type(graph).__name__}",
            remedy="pass the graph module itself; for an ExportedProgram call whence.from_exported_program",
        )
    return graph, returned_structure(graph)


def _roles_of_graph(
    ready: fx.GraphModule, state: Sequence[StateTensor], words: GraphWords, spec: TreeSpec | None
) -> tuple[Told, TreeSpec | None]:
    """What inputs and outputs are, and the structure of the graph's result."""
    placeholders = [node for node in ready.graph.nodes if node.op == "placeholder"]
    last = next(iter(reversed(ready.graph.nodes)), None)
    if last is None or last.op != "output":
        raise UnsupportedGraph("the graph returns nothing", remedy="pass a graph with an output node")
    values, own = tree_flatten(last.args[0])
    last.args = (tuple(values),)
    notes = list(last.meta.get("desc") or ())
    notes = notes if len(notes) == len(values) else [None] * len(values)
    found = told(placeholders, list(zip(values, notes, strict=True)), state, words)
    results = found.results or [Result(value, OutputKind.USER) for value in values]
    return replace(found, results=results), spec if spec is not None else own


def _refuse_graph(ready: fx.GraphModule, faults: Sequence[Fault]) -> None:
    if faults:
        raise refusal(ready.graph, faults)


def _kind_faults(ready: fx.GraphModule) -> Iterator[Fault]:
    for node in ready.graph.nodes:
        if node.op in ("call_module", "call_method"):
            yield Fault(
                f"{node.name} is a {node.op} of {node.target}",
                why="a program consists of operators",
                remedy="pass the graph before its operations are gathered in modules",
            )


class _Inputs:
    """The placeholders of the program: the whole state of the model, constants, arguments, tangents."""

    def __init__(
        self,
        graph: fx.Graph,
        subject: Subject,
        state: Sequence[StateTensor],
        slots: Sequence[Slot],
        arguments: Arguments,
    ) -> None:
        self.graph = graph
        self.subject = subject
        self.arguments = arguments
        self.held: dict[str, fx.Node] = {}
        self.rows: dict[str, Input] = {}
        self.state: dict[str, Tensor] = {}
        self.tangents: list[fx.Node] = []
        self.tangent_of: dict[str, int] = {}
        self._fake = fakes_like([slot.node.meta.get("val") for slot in slots])
        for row in sorted(state, key=lambda row: not row.is_parameter):
            self._add_state(row, [slot for slot in slots if slot.state is row])
        for slot in slots:
            if slot.kind is InputKind.CONSTANT:
                self._add_constant(slot)
        for leaf in arguments.leaves:
            self._add_argument(leaf.name, leaf.path, leaf.aliases, leaf.value, leaf.slot)
        for slot in slots:
            if slot.kind is InputKind.TANGENT:
                self._add_tangent(slot)

    def _placeholder(self, name: str, value: Any, slots: Sequence[Slot]) -> fx.Node:
        node = placeholder(self.graph, name, {"val": value})
        self.held |= {slot.node.name: node for slot in slots}
        return node

    def _add_state(self, row: StateTensor, slots: Sequence[Slot]) -> None:
        first, *others = row.paths
        value = slots[0].node.meta.get("val") if slots else None
        value = self._fake(row.tensor) if value is None else value
        if value.is_leaf and value.requires_grad is not row.tensor.requires_grad:
            value = value.detach().requires_grad_(row.tensor.requires_grad)
        node = self._placeholder(state_name(row.kind, first), value, slots)
        self.state[node.name] = row.tensor
        self.rows[node.name] = Input(
            node.name,
            row.kind,
            str(first),
            tuple(map(str, others)),
            first.parent,
            row.owner,
            None,
            value,
            row.persistent,
        )

    def _add_constant(self, slot: Slot) -> None:
        name = state_name(InputKind.CONSTANT, ModulePath.parse(slot.path.replace(".", "_").strip("_")))
        value = slot.node.meta.get("val")
        node = self._placeholder(name, value, [slot])
        self.state[node.name] = slot.node.meta[ATTRIBUTE]
        self.rows[node.name] = Input(node.name, InputKind.CONSTANT, slot.path.replace(".", "_"), value=value)

    def _add_argument(
        self, name: str, path: str, aliases: tuple[str, ...], value: Any, slot: Slot | None
    ) -> None:
        node = self._placeholder(name, value, [slot] if slot else [])
        self.rows[node.name] = Input(node.name, InputKind.USER, path, aliases, value=value)

    def _add_tangent(self, slot: Slot) -> None:
        node = self._placeholder(f"tangent_{slot.of}", slot.node.meta.get("val"), [slot])
        self.tangents.append(node)
        self.tangent_of[node.name] = slot.of or 0
        self.rows[node.name] = Input(node.name, InputKind.TANGENT, slot.path, value=node.meta["val"])

    def named(self, path: str) -> Input:
        return next(row for row in self.rows.values() if path in (row.path, *row.aliases))


def _flat_of_graph(ready: fx.GraphModule, inputs: _Inputs) -> Flat:
    flat = flattened(ready, inputs.held, inputs.graph)
    without_hidden_writes(flat)
    UnsupportedGraph.refuse(flat.faults)
    return flat


def _result_nodes(results: Sequence[Result], kind: OutputKind) -> Iterator[fx.Node]:
    return (row.value for row in results if row.kind is kind and isinstance(row.value, fx.Node))


def _attributed(nodes: Sequence[fx.Node], phases: Phases, subject: Subject, inputs: _Inputs) -> Sites:
    types = {path: type(module).__name__ for path, module in subject.named_modules()}
    owners = {row.name: row.module for row in inputs.rows.values() if row.module is not None}
    spelling = spelling_of(map(str, types), nodes, owners)
    kind = types.get(ROOT, subject.name)
    sites = calls_of(nodes, phases, Modules(types, spelling), kind)
    write_origins(nodes, sites, phases)
    return sites


def _summed(graph: fx.Graph, results: Sequence[Result], inputs: _Inputs) -> list[Result]:
    """One gradient for each input: of a tied parameter AOT autograd gives one for each of its names."""
    found: list[Result] = []
    first: dict[str, int] = {}
    for row in results:
        owner = inputs.named(row.of).name if row.kind is OutputKind.GRADIENT and row.of is not None else None
        at = None if owner is None else first.setdefault(owner, len(found))
        if at is None or at == len(found):
            found.append(row)
        elif isinstance(row.value, fx.Node):
            before = found[at].value
            total = _sum(graph, before, row.value) if isinstance(before, fx.Node) else row.value
            found[at] = Result(total, row.kind, row.of)
    return found


def _sum(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    total = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
    total.meta["val"] = left.meta["val"]
    calls = tuple(dict.fromkeys((*origin_of(left).calls, *origin_of(right).calls)))
    qualities = {origin_of(left).quality, origin_of(right).quality}
    quality = Quality.NONE if Quality.NONE in qualities else Quality.INFERRED
    set_origin(total, Origin(Phase.BACKWARD, calls, quality))
    return total


@dataclass(frozen=True)
class _AttachedParts:
    """What a program is put together from."""

    inputs: _Inputs
    flat: Flat
    functional: Functional
    sites: Sites
    phases: Phases
    results: Sequence[Result]
    structure: TreeSpec | None

    @property
    def graph(self) -> fx.Graph:
        return self.flat.graph


def _program_of_graph(parts: _AttachedParts, sizes: Sizes | None) -> FlatProgram:
    graph, inputs = parts.graph, parts.inputs
    outputs, values, result = _output_rows(parts)
    graph.output(tuple(values))
    seed = None if parts.phases.seed is None else parts.functional.final(parts.phases.seed)
    has_backward = _is_joint(parts, outputs, seed)
    straight = frozenset() if has_backward else _cut(parts)
    names = {id(tensor): name for name, tensor in inputs.state.items()}
    convention = inputs.arguments.convention(any(reads_memory(node.target) for node in graph.nodes))
    facts = GraphFacts(
        seed=None if seed is None or not has_backward else seed.name,
        histories=_written_histories(parts, outputs),
        straight_through=straight | {n.name for n in parts.functional.straight if not has_backward},
    )
    write_facts(graph, facts)
    program = FlatProgram(
        graph_module=graph_module(dict(parts.flat.nested), graph, inputs.subject.name),
        signature=Signature(tuple(_input_rows(parts, outputs, has_backward=has_backward)), tuple(outputs)),
        calls=replace(parts.sites.calls, entry=ROOT_MODULE),
        convention=replace(convention, sizes=sizes),
        result=result,
        modules=module_records(inputs.subject, names),
        state=inputs.state,
        circumstances=Circumstances(has_backward=has_backward, is_foreign=True),
    )
    calls = with_structures(program)
    exchanged = frozenset(
        name for call in calls for name in (call.outputs.names if call.outputs else ()) if has_backward
    )
    write_facts(graph, replace(facts, differentiable=exchanged))
    return program.with_changes(calls=calls)


def _is_joint(parts: _AttachedParts, outputs: Sequence[Output], seed: fx.Node | None) -> bool:
    """Whether the tree runs forward and backward apart; a graph that also updates its state runs as one."""
    if not parts.inputs.tangents and (seed is None or not _of_kind(outputs, OutputKind.GRADIENT)):
        return False
    nodes = {node.name: node for node in parts.graph.nodes}
    written = [nodes[row.node] for row in _of_kind(outputs, OutputKind.MUTATION) if row.node is not None]
    return all(origin_of(node).phase is Phase.FORWARD for node in written)


def _of_kind(outputs: Sequence[Output], kind: OutputKind) -> list[Output]:
    return [row for row in outputs if row.kind is kind]


def _input_rows(parts: _AttachedParts, outputs: Sequence[Output], *, has_backward: bool) -> Iterator[Input]:
    """The inputs; of a joint program, a parameter without a gradient takes none."""
    results = [row.name for row in outputs if row.kind is OutputKind.USER]
    given = {row.of for row in outputs if row.kind is OutputKind.GRADIENT}
    for name, row in parts.inputs.rows.items():
        at = parts.inputs.tangent_of.get(name)
        fields = {**vars(row)}
        if at is not None and at < len(results):
            fields["of"] = results[at]
        if has_backward and row.kind is InputKind.PARAMETER and name not in given:
            fields["value"] = row.value.detach()
        yield Input(**fields)


def _output_rows(parts: _AttachedParts) -> tuple[list[Output], list[Any], Structure]:
    """The rows of the signature with their values, and the structure of the result."""
    final = parts.functional.final
    values = [final(row.value) if isinstance(row.value, fx.Node) else row.value for row in parts.results]
    pairs = list(zip(parts.results, values, strict=True))
    users = [value for row, value in pairs if row.kind is OutputKind.USER]
    spec = _structure_returned(parts, len(users))
    rows: list[tuple[Output, Any]] = [
        (Output("loss", OutputKind.LOSS, "loss", node=value.name), value)
        for row, value in pairs
        if row.kind is OutputKind.LOSS
    ]
    rows += zip(user_outputs(users, spec), users, strict=True)
    rows += _belonging(parts, pairs, OutputKind.MUTATION, "new")
    rows += _written_in_place(parts, {row.of for row, _ in rows})
    rows += _belonging(parts, pairs, OutputKind.GRADIENT, "grad")
    return [row for row, _ in rows], [value for _, value in rows], result_of(users, spec)


def _structure_returned(parts: _AttachedParts, count: int) -> TreeSpec:
    """As the graph says where all it returns is the user's; or else one value, or a tuple."""
    spec = parts.structure
    if spec is not None and spec.num_leaves == count and (count == len(parts.results) or spec.is_leaf()):
        return spec.children()[0] if _is_row_of_one(spec) else spec
    return tree_flatten(tuple(range(count)) if count != 1 else 0)[1]


def _is_row_of_one(spec: TreeSpec) -> bool:
    """Graphs return a row even of one value."""
    return not spec.is_leaf() and spec.type in (tuple, list) and spec.num_children == 1


def _belonging(
    parts: _AttachedParts, pairs: Sequence[tuple[Result, Any]], kind: OutputKind, word: str
) -> Iterator[tuple[Output, Any]]:
    for row, value in pairs:
        if row.kind is kind and row.of is not None:
            owner = parts.inputs.named(row.of)
            held = value.name if isinstance(value, fx.Node) else None
            yield Output(f"{word}_{owner.name}", kind, owner.path, owner.name, held), value


def _written_in_place(parts: _AttachedParts, known: set[str | None]) -> Iterator[tuple[Output, Any]]:
    """What the graph writes in place, and did not return."""
    for node in parts.graph.nodes:
        if node.op == "placeholder" and node in parts.functional.history and node.name not in known:
            value = parts.functional.final(node)
            if value is not node:
                row = parts.inputs.rows[node.name]
                yield Output(f"new_{row.name}", OutputKind.MUTATION, row.path, row.name, value.name), value


def _written_histories(parts: _AttachedParts, outputs: Sequence[Output]) -> dict[str, tuple[str, ...]]:
    gone = {node.name: [v.name for v in values] for node, values in parts.functional.history.items()}
    return {
        row.of: tuple(dict.fromkeys((*gone.get(row.of, ()), row.node)))
        for row in outputs
        if row.kind is OutputKind.MUTATION and row.of is not None and row.node is not None
    }


def _cut(parts: _AttachedParts) -> frozenset[str]:
    """Gradients stay stopped where the graph ran without them."""
    return cut_gradients(
        parts.functional,
        lambda node: bool(said_of(node).get(WITHOUT_GRAD)),
        open_inputs={*parts.functional.graph.find_nodes(op="placeholder")},
    )
