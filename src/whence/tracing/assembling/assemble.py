"""From the log and origins to a program: order placeholders, drop what nothing uses, write the signature."""

from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from whence._torch.autograd.derivatives import weigh_as_eager
from whence._torch.autograd.nodes import history_of
from whence._torch.autograd.switches import Switches
from whence._torch.fakes import FakeTensor
from whence._torch.graphs import graph_module
from whence._torch.operators.schemas import reads_memory
from whence._torch.refusals import made_unseen
from whence._torch.sizes.symbols import without_decisions
from whence._torch.tensors import autocast_state
from whence.program import (
    Absent,
    Adjoint,
    Call,
    Calls,
    Circumstances,
    Constant,
    Contribution,
    Convention,
    FlatProgram,
    GraphFacts,
    Named,
    Signature,
    Structure,
    Whole,
)
from whence.program.arguments.convention import tied_positions
from whence.program.calls import Leaf
from whence.program.node_records import origin_of, place_of, set_origin, write_facts
from whence.program.queries.selecting import preserved_calls
from whence.program.replay import graph_copies
from whence.provenance import ModulePath
from whence.rewriting.cut_gradients import cut_gradients
from whence.rewriting.functionalize import Functional, functionalize
from whence.rewriting.simplify import erase, order_placeholders, placeholders_of, unused
from whence.schema import OutputKind, Phase, TensorFact
from whence.tracing.assembling.aside import held_by_python, unread_operations
from whence.tracing.assembling.asked import (
    as_given,
    asked_of_inputs,
    differentiated,
    free_of_layout,
    questions_to_inputs,
)
from whence.tracing.assembling.attribution import (
    attribute_branches,
    custom_functions,
    reuse_random_draws,
    without_operators,
)
from whence.tracing.assembling.leaves import mark_leaves
from whence.tracing.assembling.opaque import unrepeatable
from whence.tracing.assembling.reshapes import decide_again, rule_out_ones
from whence.tracing.assembling.shared_memory import refuse_shared_writes, refuse_tied
from whence.tracing.assembling.signature_rows import GraphValues, inputs_present, signature_of, wholes_of
from whence.tracing.assembling.size_rules import with_sizes
from whence.tracing.attribution.gradient_edges import GradientSums
from whence.tracing.listening.call_names import CallNames
from whence.tracing.log.events import Opened
from whence.tracing.log.log import ran_without
from whence.tracing.recording.run import Recorded
from whence.tracing.replay.records.expand import Exchanged, expand
from whence.tracing.target.example import Example
from whence.tracing.target.subject import Subject, module_records


def assemble(
    subject: Subject, example: Example, recorded: Recorded, functional: Functional, exchanged: Exchanged
) -> FlatProgram:
    """The program of one finished run."""
    session, graph = recorded.session, recorded.session.recorder.graph
    custom = {} if recorded.backward.roots else custom_functions(_histories_of_results(recorded.results))
    asked = {*asked_of_inputs(session.log, functional, {*recorded.prepared.nodes}, frozenset(custom))}
    values = _final_values(recorded, functional)
    opaque = without_operators(custom, session.log)
    between = _begins_between(recorded, values)
    straight = _as_differentiated(recorded, functional, frozenset(custom))
    refuse_shared_writes(recorded, values, preserves=bool(example.preserve))
    signature, outputs = signature_of(subject, example, recorded, values)
    graph.output(tuple(outputs))
    if session.recorder.environment is not None:
        decide_again(graph, functional.history, session.recorder.environment)
        if recorded.backward.roots:
            rule_out_ones(graph, session.recorder.environment)
    weigh_as_eager(graph)
    repeated = reuse_random_draws(functional, session.log.redraws)
    preserved = _preserved(recorded, example, subject)
    keep = _needed(recorded, signature, functional) | _arguments(recorded, functional, preserved)
    nested = session.recorder.nested
    gone = unused(graph, nested, repeated, keep)
    unread = unread_operations(reversed(gone), subject.name)
    erase(gone)
    held = held_by_python(session.recorder.lifetimes, graph, gone)
    present = _real_placeholders(subject, example, recorded)
    inputs = tuple(inputs_present(signature, present, asked))
    signature = replace(signature, inputs=inputs, wholes=wholes_of(subject, recorded))
    order_placeholders(graph, [row.name for row in signature.inputs])
    names = _present_names(graph, functional)
    _rename_forwards(graph, names)
    facts = GraphFacts(
        seed=_seed_name(recorded),
        adjoints=_renamed_adjoints(exchanged.adjoints, names),
        histories=_histories_of_inputs(values, functional),
        written=_written_between(functional),
        differentiable=_differentiable(recorded, values, exchanged, names),
        straight_through=straight,
        behind=straight & functional.names_behind,
        turned_on=_turned_on(recorded, functional),
        turned_off=_turned_off(recorded, functional),
    )
    write_facts(graph, facts)
    reasons = unrepeatable(opaque, recorded, functional, between=between)
    return FlatProgram(
        graph_module=graph_module(nested, graph, subject.name),
        signature=signature,
        calls=replace(_call_rows(recorded, names), entry=int(subject.is_module), preserved=preserved),
        convention=_convention(subject, example, recorded, asked, functional),
        result=Structure(recorded.result_spec, _result_leaves(recorded, values)),
        modules=module_records(subject, _tensor_names(recorded, signature.wholes)),
        state=_state(recorded, graph, signature.wholes),
        circumstances=replace(_circumstances(recorded, signature, reasons), unread=unread, held=held),
    )


def _circumstances(recorded: Recorded, signature: Signature, opaque: tuple[str, ...]) -> Circumstances:
    session = recorded.session
    return Circumstances(
        has_backward=bool(recorded.backward.roots),
        autocast=autocast_state(),
        asked=session.run.answers.compiled,
        opaque=opaque,
        modes=tuple(session.log.modes.values()),
        replay=session.replay.replayer.report(),
        dtype_asked=next(iter(session.log.dtypes_asked), ""),
        differentiated=differentiated(session.log, signature),
        taken_apart=bool(session.log.apart) or not session.recorder.keeps_composites,
    )


def _begins_between(recorded: Recorded, values: GraphValues) -> bool:
    """Let results that begin a history say so; whether others are computed from one."""
    session = recorded.session
    is_wanted = session.run.grad_modes.records and not recorded.backward.roots
    return is_wanted and mark_leaves(
        recorded.results, values.results, session.recorder, recorded.prepared.leaves
    )


def _as_differentiated(recorded: Recorded, functional: Functional, custom: frozenset[int]) -> frozenset[str]:
    """Let autograd find in a forward-only program what it found in the run; nodes that hand gradients on."""
    if recorded.backward.roots:
        return frozenset()
    stops = ran_without(recorded.session.log.marks, custom)
    straight = cut_gradients(functional, stops, open_inputs={*recorded.prepared.nodes})
    return straight | {node.name for node in functional.straight}


def _turned_on(recorded: Recorded, functional: Functional) -> frozenset[str]:
    """What a forward-only program records gradients of although its caller may not want any."""
    marks = recorded.session.log.marks
    if recorded.backward.roots or not any(mark.turned_on for mark in marks.values()):
        return frozenset()
    return functional.names_where(lambda node: node in marks and marks[node].turned_on)


def _turned_off(recorded: Recorded, functional: Functional) -> frozenset[str]:
    """What asks for the grad mode, and has to hear that it is off whatever a caller's is."""
    off = {node for node, mark in recorded.session.log.marks.items() if mark.turned_off}
    return functional.names_where(off.__contains__) if off else frozenset()


def _convention(
    subject: Subject,
    example: Example,
    recorded: Recorded,
    asked: Set[tuple[str, TensorFact]],
    functional: Functional,
) -> Convention:
    paths = {node.name: path for path, node in zip(example.paths, recorded.prepared.nodes, strict=True)}
    state = {node.name: str(row.paths[0]) for row, node in recorded.prepared.state}
    free = free_of_layout(recorded, functional, {name for name, fact in asked if fact is TensorFact.STRIDES})
    log, graph = recorded.session.log, recorded.session.recorder.graph
    leaves = tuple(map(as_given, recorded.prepared.nodes, example.leaves))
    turned = {
        (node.name, TensorFact.REQUIRES_GRAD)
        for node, leaf in zip(recorded.prepared.nodes, leaves, strict=True)
        if leaf is not node.meta["val"]
    }
    facts = sorted((paths[name], fact) for name, fact in asked - turned if name in paths)
    return Convention(
        spec=example.spec,
        leaves=leaves,
        paths=example.paths,
        parameters=subject.parameters,
        same=tied_positions(example.leaves),
        reads_memory=any(map(reads_memory, _targets(graph))),
        any_layout=frozenset((paths | state)[name] for name in free),
        layouts=frozenset(path for path, fact in facts if fact is TensorFact.STRIDES),
        returned=recorded.returned,
        facts=tuple(row for row in facts if row[1] is not TensorFact.STRIDES),
        questions=questions_to_inputs(log, recorded.prepared, graph),
    )


def _differentiable(
    recorded: Recorded, values: GraphValues, exchanged: Exchanged, names: "_Names"
) -> frozenset[str]:
    """What carried a gradient: values that modules exchanged, and results as they are after all writes."""
    keys, results = recorded.session.log.keys, zip(recorded.result_nodes, values.results, strict=True)
    written = {value.name for node, value in results if node in keys and value is not None}
    return frozenset(names.name(node.name) or "" for node in exchanged.values) | written


def _final_values(recorded: Recorded, functional: Functional) -> GraphValues:
    last = _last_of_forward(recorded)

    def final(node: fx.Node | None) -> fx.Node | None:
        return None if node is None else functional.final(node, last)

    inputs = [*(node for _, node in recorded.prepared.state), *recorded.prepared.nodes]
    inputs += [node for node in recorded.session.recorder.graph.nodes if node.op == "placeholder"]
    written = {
        node: value for node in dict.fromkeys(inputs) if (value := functional.final(node, last)) is not node
    }
    refuse_tied(recorded, written)
    written |= {placeholder: functional.final(node, last) for placeholder, node in recorded.reassigned}
    return GraphValues(
        loss=final(recorded.backward.loss),
        results=tuple(map(final, recorded.result_nodes)),
        written=written,
        gradients=tuple(
            None if node is None else functional.final(node) for node in recorded.backward.gradients
        ),
        kept=tuple(functional.final(kept.node, last) for kept in recorded.kept),
    )


def _last_of_forward(recorded: Recorded) -> fx.Node | None:
    """The last operation of the forward that is still in the graph; None in a step, which ends elsewhere."""
    if recorded.is_step:
        return None
    graph = recorded.session.recorder.graph
    forward = (
        node
        for node in reversed(graph.nodes)
        if node.op == "call_function" and origin_of(node).phase is Phase.FORWARD
    )
    return next(forward, None)


def _histories_of_inputs(values: GraphValues, functional: Functional) -> dict[str, tuple[str, ...]]:
    return {
        placeholder.name: tuple(
            dict.fromkeys((*(node.name for node in functional.history.get(placeholder, [])), value.name))
        )
        for placeholder, value in values.written.items()
    }


def _written_between(functional: Functional) -> dict[str, tuple[str, ...]]:
    """The values that a tensor went through, in graph order; some are needed for nothing, and gone."""
    left = dict.fromkeys(functional.graph.nodes)
    written = {
        base.name: tuple(node.name for node in functional.history[base] if node in left)
        for base in left
        if base in functional.history and base.op != "placeholder"
    }
    return {name: values for name, values in written.items() if values}


def _histories_of_results(results: Iterable[Any]) -> list[Any]:
    histories = [history_of(leaf) for leaf in results if isinstance(leaf, Tensor)]
    return [history for history in histories if history is not None]


def _targets(graph: fx.Graph) -> list[Any]:
    """What the nodes of a graph call, each once; an operator's own hash is a call of Python code."""
    return list({id(node.target): node.target for node in graph.nodes}.values())


def _present_names(graph: fx.Graph, functional: Functional) -> "_Names":
    """Where a name that was recorded is found now, for names that moved or went."""
    present = {node.name for node in graph.nodes}
    moved = _moved(functional)
    names: dict[str, Leaf] = {
        old: Named(new) for old, new in moved.items() if new in present and old not in present
    }
    return _Names(names, present)


def _moved(functional: Functional) -> dict[str, str]:
    return {old.name: functional.value_of(old).name for old in functional.replaced}


class _Names(dict[str, Leaf]):
    """Recorded names to present leaves; a name that is gone is absent, and says why."""

    def __init__(self, moved: dict[str, Leaf], present: set[str]) -> None:
        super().__init__(moved)
        self.present = present

    def get(self, name: str, default: Any = None) -> Any:
        if name in self.present:
            return default
        found = super().get(name)
        return Absent("nothing in the program uses this value") if found is None else found

    def name(self, name: str) -> str | None:
        if name in self.present:
            return name
        moved = super().get(name)
        return moved.name if isinstance(moved, Named) else None


def _rename_forwards(graph: fx.Graph, names: "_Names") -> None:
    for node in graph.nodes:
        origin = origin_of(node)
        if origin.forward is not None and origin.forward not in names.present:
            set_origin(node, origin._replace(forward=names.name(origin.forward)))


def _real_placeholders(subject: Subject, example: Example, recorded: Recorded) -> Container[str]:
    """The inputs that are left; raises where one is a fake tensor of the run, which nobody saw being made."""
    graph = recorded.session.recorder.graph
    present = placeholders_of(graph)
    literals, given = recorded.session.log.literals, [*example.leaves, *(row.tensor for row in subject.state)]
    lost = [name for name, held in literals.items() if name in present and isinstance(held, FakeTensor)]
    if not lost or any(isinstance(each, FakeTensor) for each in given):
        return present
    nodes = [node for node in graph.nodes if node.name in lost]
    reader = next(iter(nodes[0].users), nodes[0])
    raise made_unseen(place_of(reader))


def _needed(recorded: Recorded, signature: Signature, functional: Functional) -> set[str]:
    """What stays although nothing may read it: inputs, what is written, and where the backward begins."""
    behind = frozenset() if recorded.backward.roots else functional.names_behind
    literals = recorded.session.log.literals
    inputs = {row.name for row in signature.inputs if row.name not in literals}
    written = {str(row.of) for row in signature.outputs_of(OutputKind.MUTATION)}
    return inputs | written | behind | {_seed_name(recorded) or ""}


def _arguments(recorded: Recorded, functional: Functional, preserved: Iterable[int]) -> set[str]:
    """The values that preserved calls take, whether or not anything reads them."""
    moved, log = _moved(functional), recorded.session.log
    taken = (log.taken.get(number) for number in preserved)
    return {
        found
        for inputs in taken
        if inputs
        for name in inputs.names
        for found in (name, moved.get(name, name))
    }


def _preserved(recorded: Recorded, example: Example, subject: Subject) -> frozenset[int]:
    """The calls that keep their calling convention, by number."""
    scopes = enumerate(recorded.session.log.scopes if example.preserve else ())
    calls = Calls(tuple(Call(number, scope.site, scope.parent) for number, scope in scopes))
    return preserved_calls(calls, example.preserve, int(subject.is_module))


def _call_rows(recorded: Recorded, names: "_Names") -> Calls:
    log = recorded.session.log
    scopes = log.scopes
    rows = [
        Call(
            number,
            scope.site,
            scope.parent,
            log.taken[number].renamed(names) if number in log.taken else None,
            log.given[number].renamed(names) if number in log.given else None,
            scope.parameters,
            _others(scope, recorded.session.run.names),
            scope.autocast,
            _turned(scope.switches, scopes[0].switches),
            scope.records or not scopes[0].records,
        )
        for number, scope in enumerate(scopes)
    ]
    return Calls(tuple(rows))


def _turned(now: Switches, before: Switches) -> Switches:
    """The switches that are otherwise than before."""
    return {} if now == before else {name: value for name, value in now.items() if value != before[name]}


def _others(scope: Opened, names: CallNames) -> tuple[ModulePath, ...]:
    """Further names of the module of a call that its caller did not read by a name."""
    if scope.is_reached or scope.module is None:
        return ()
    return tuple(name for name in names.names_of(scope.module) if name != scope.site.path)


def _result_leaves(recorded: Recorded, values: GraphValues) -> tuple[Leaf, ...]:
    return tuple(
        Constant(leaf) if node is None else Named(node.name)
        for leaf, node in zip(recorded.results, values.results, strict=True)
    )


def _tensor_names(recorded: Recorded, wholes: Sequence[Whole]) -> dict[int, str]:
    names = {id(tensor): name for name, tensor in recorded.session.log.literals.items()}
    names |= {id(row.tensor): node.name for row, node in recorded.prepared.state}
    return names | {id(whole.tensor): whole.name for whole in wholes}


def _state(recorded: Recorded, graph: fx.Graph, wholes: Sequence[Whole]) -> dict[str, Tensor]:
    state = {node.name: row.tensor for row, node in recorded.prepared.state}
    present = placeholders_of(graph)
    literals = recorded.session.log.literals
    state |= {name: tensor for name, tensor in literals.items() if name in present}
    return state | {whole.name: whole.tensor for whole in wholes if whole.tensor is not None}


def _seed_name(recorded: Recorded) -> str | None:
    return recorded.backward.roots[0][1].name if recorded.backward.loss is not None else None


def _renamed_adjoints(adjoints: Mapping[str, Adjoint], names: "_Names") -> dict[str, Adjoint]:
    renamed = {}
    for value, adjoint in adjoints.items():
        parts = [
            Contribution(node, part.scope, None if part.sum is None else names.name(part.sum))
            for part in adjoint.contributions
            if (node := names.name(part.node)) is not None
        ]
        if (now := names.name(value)) is not None and len(parts) == len(adjoint.contributions):
            renamed[now] = Adjoint(tuple(parts))
    return renamed


def finished(example: Example, recorded: Recorded, gradients: GradientSums) -> FlatProgram:
    """The program of an attributed run; raises `Doubt` where a record cannot be used after all."""
    session = recorded.session
    recorder = session.recorder
    attribute_branches(recorder.graph, recorder.nested)
    with without_decisions(recorder.environment):  # recorded writes have decided already
        functional = functionalize(recorder.graph, recorder.sizes)
    exchanged = expand(session.replay.records, session.log, functional, gradients)
    program = assemble(session.run.subject, example, recorded, functional, exchanged)
    program = with_sizes(program, example, recorded)
    known = graph_copies(program.graph, exchanged.copies)
    return program.under(replay=replace(program.replay, known=known))
