"""Run the model once, forward and backward, and write the log."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.autograd.derivatives import formulas_refused
from whence._torch.autograd.grad_modes import observed_grad_modes
from whence._torch.autograd.mode_questions import GRAD
from whence._torch.autograd.nodes import outside_inference_mode
from whence._torch.autograd.own_derivatives import observed_derivatives
from whence._torch.autograd.replaced_data import replaced_inputs
from whence._torch.autograd.saved_tensors import observed_packing
from whence._torch.autograd.switches import modes_restored
from whence._torch.deciding.decider import deciding
from whence._torch.fakes import FakeTensorMode, classes_said_in_eager
from whence._torch.higher_order.function_graphs import functions_traced, operators_called_directly
from whence._torch.observe.checkpoints import checkpoints_as_in_eager, observed_checkpoints
from whence._torch.observe.compile_flags import compiled_functions_run_eagerly, compiling_on_this_thread
from whence._torch.observe.module_calls import CallObserver, observed_modules, observed_writes
from whence._torch.patching import patches_undone
from whence._torch.pytrees import TreeSpec, tree_flatten, whole_leaves
from whence._torch.sizes.numbers import is_recorded
from whence._torch.sizes.plain_answers import symbols_taken_for_numbers
from whence._torch.sizes.symbols import SYMBOLIC, fake_mode_of, is_symbolic, number_of
from whence._torch.subclasses.wrapper_subclasses import has_static_sizes, is_composed, layout_of
from whence._torch.tensor_questions import all_asked_of, with_attributes_of
from whence._torch.tensors import clear_autocast_cache, tensors_restored
from whence.dependence.snapshots import way_back
from whence.errors import InvalidLoss, Place, UnsupportedInput
from whence.program.arguments.containers import containers_in
from whence.program.arguments.convention import parts_in
from whence.program.names import state_name
from whence.program.signature import Input, Part
from whence.schema import InputKind, Phase
from whence.tracing.listening.data_dependence import INPUT, formula_decides
from whence.tracing.listening.run_state import RunState, run_state
from whence.tracing.log.events import GivenTensor, InputNamed, LossHolds, Lost
from whence.tracing.objections import result_opened
from whence.tracing.reads.attribute_reads import RestListener
from whence.tracing.reads.type_queries import StandIn
from whence.tracing.recording.backward import Backward, differentiate
from whence.tracing.recording.partial import keeping_what_was_recorded
from whence.tracing.recording.session import Session, new_session
from whence.tracing.recording.side_effects import SideEffects
from whence.tracing.replay.records.rehearsal import rehearsed
from whence.tracing.reuse import Reuse
from whence.tracing.sandbox.leftovers import RunValues
from whence.tracing.sandbox.module_snapshot import Lines, changes_reported, kept_of, reassigned_buffers
from whence.tracing.sandbox.undo import Interrupts, Undoing
from whence.tracing.source_lines import SourceFinder, beginning_of
from whence.tracing.target.caches import open_caches
from whence.tracing.target.changed_containers import changed_and_returned
from whence.tracing.target.eligibility import refuse_kinds
from whence.tracing.target.example import REGISTER, Example, is_plain_constant
from whence.tracing.target.loss_state import tensors_of_loss
from whence.tracing.target.placeholders import (
    Prepared,
    fake_arguments,
    refuse_own_parameters,
    refuse_returned_parameters,
    wholes_of_arguments,
    wholes_of_state,
)
from whence.tracing.target.subject import StateTensor, Subject, attribute_names, plain_tensors
from whence.tracing.target.symbols import Symbols, symbols_for

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class PutValue:
    """A value that a step leaves in what it is part of: `node` holds it, and `path` says where."""

    name: str
    path: str
    node: fx.Node


@dataclass(frozen=True)
class Recorded:
    """One finished run: the log, and which nodes are results, tangents and gradients.

    `reassigned` pairs the placeholder of a buffer with the node that replaced it. `rows` are inputs of other
    kinds, `kept` outputs beside the results. `returned` are containers of the arguments that the model
    changed and gave back. A run that `is_step` has no half that is the forward: what it leaves is what there
    is at the end.
    """

    session: Session
    prepared: Prepared
    result_spec: TreeSpec
    results: tuple[Any, ...]
    result_nodes: tuple[fx.Node | None, ...]
    result_parts: tuple[Part | None, ...]
    reassigned: tuple[tuple[fx.Node, fx.Node], ...]
    backward: Backward = field(default_factory=Backward)
    rows: tuple[tuple[Input, fx.Node], ...] = ()
    kept: tuple[PutValue, ...] = ()
    returned: tuple[tuple[str, str], ...] = ()
    is_step: bool = False


def record(
    subject: Subject, example: Example, backward: bool | Loss, interrupts: Interrupts, reuse: Reuse
) -> Recorded:
    """Run `subject` on fake twins of its inputs; everything is as before afterwards, also after an error."""
    refuse_kinds(subject, differentiates=bool(backward))
    undoing = Undoing()
    state = state_of_run(subject, lines := Lines(), interrupts, reuse)
    own_gradients = bool(backward and example.preserve)
    mode = mode_of(example, subject.state)
    session = new_session(
        state,
        mode,
        attribute_tensor_names(subject),
        reuse,
        own_gradients=own_gradients,
        elsewhere=example.elsewhere,
    )

    def run() -> Recorded:
        with (
            keeping_what_was_recorded(session),
            surroundings_kept(session, undoing, lines, decides=example.decides),
        ):
            return _recorded(session, example, backward)

    with session.ended_by_errors():
        return undoing.around(run)


def rehearse(
    subject: Subject,
    example: Example,
    state: Sequence[StateTensor],
    observing: Callable[[Session], CallObserver],
    interrupts: Interrupts,
) -> None:
    """Run the forward of `subject` on fake tensors for an observer of its module calls; keep nothing."""
    reuse = Reuse(wanted=False)
    run = state_of_run(subject, Lines(), interrupts, reuse, rehearse.__code__)
    session = new_session(run, mode_of(example, state), attribute_tensor_names(subject), reuse)
    try:
        prepared = prepare(session, example, state)
        with listening(session, observing(session), prepared), session.branches.recording(session.recorder):
            run_subject(session, subject, prepared.arguments)
    finally:
        session.end()


def state_of_run(
    subject: Subject, lines: Lines, interrupts: Interrupts, reuse: Reuse, *begins: CodeType
) -> RunState:
    """The state of a run; lines of user code are found in what is called from here on, or from functions with
    these codes."""
    boundaries = (record.__code__, *begins, rehearsed.__code__)
    watched = frozenset(id(module) for _, module in subject.named_modules())
    return run_state(subject, SourceFinder(boundaries, watched), lines, interrupts, reuse)


def attribute_tensor_names(subject: Subject) -> dict[int, str]:
    """What tensors are called that modules hold as plain attributes, by identity."""
    named = attribute_names(subject).items()
    return {key: state_name(InputKind.CONSTANT, path) for key, (path, _) in named}


@contextmanager
def listening(
    session: Session, observer: CallObserver, prepared: Prepared, outside: RestListener | None = None
) -> Iterator[None]:
    """Everything that a run tells: module calls, changes of modules, checkpoints, questions."""
    run, branches = session.run, session.branches
    finder, here, running = run.places.finder, run.places.here, run.running
    values = RunValues(session.recorder, frozenset(prepared.nodes), session.log.marks)
    with (
        compiling_on_this_thread(partial(run.answers.to_whoever_asks, finder), session.is_plainly_eager),
        classes_said_in_eager(),
        symbols_taken_for_numbers(),
        compiled_functions_run_eagerly(),
        operators_called_directly(),
        functions_traced(branches.traced, session.recorder.fake_mode),
        observed_modules(observer),
        observed_writes(run.watch),
        observed_checkpoints(session.calls),
        checkpoints_as_in_eager(session.recorder.graph),
        run.reads.active(prepared, values, session.tensors.line_of, outside),
        observed_packing(run.watch.packing, partial(session.recorder.listener.model.mode_asked, GRAD)),
        observed_derivatives(lambda what: session.log.add(Lost(what))),
        formulas_refused(lambda: running.phase is Phase.FORWARD, lambda name: formula_decides(name, here())),
        session.recorder.functions.seen_by(run.reads.reachable.began),
        session.recorder.functions.aside(),
    ):
        yield


def _recorded(session: Session, example: Example, backward: bool | Loss) -> Recorded:
    run, subject = session.run, session.run.subject
    if backward:
        refuse_own_parameters(subject, example)
    prepared = prepare(session, example, subject.state)
    with (
        listening(session, session.calls, prepared),
        torch.set_grad_enabled(bool(backward) or torch.is_grad_enabled()),
        observed_grad_modes(run.grad_modes),
        session.branches.recording(session.recorder),
        values_deciding(session, example, prepared),
    ):
        given = containers_in(prepared.arguments)
        run.reads.reachable.has_symbols = session.recorder.environment is not None
        run.reads.reachable.code_of(subject.call)
        if callable(backward):
            run.reads.reachable.loss(backward)
        result = run_subject(session, subject, prepared.arguments)
        returned = changed_and_returned(subject, given, result)
        loss = _computed_loss(session, backward, result) if callable(backward) else None
        recorded = replace(forward_half(session, subject, prepared, result), returned=returned)
        if backward is True:
            refuse_returned_parameters(subject, prepared, recorded.result_nodes)
        if backward:
            passed = differentiate(session, whole_leaves(result), prepared, loss)
            now = _reassigned(session, subject, prepared)  # a hook may have put another tensor there
            recorded = replace(recorded, backward=passed, reassigned=now)
        session.replay.check(recorded.result_nodes)
        return recorded


@outside_inference_mode()
def prepare(session: Session, example: Example, state: Sequence[StateTensor]) -> Prepared:
    leaves, nodes = _user_placeholders(session, example)
    plain = plain_tensors(state)
    nodes_of_state = session.recorder.adopt_all([(row.tensor, _name_of(row)) for row in plain])
    adopted = tuple(zip(plain, nodes_of_state, strict=True))
    described = [
        (node, f"{INPUT} `{node.name}` ({path})") for node, path in zip(nodes, example.paths, strict=True)
    ]
    described += [(node, f"the {row.kind.value} {row.paths[0]}") for row, node in adopted]
    for node, words in described:
        session.log.add(InputNamed(node, words))
    for position, (node, twin) in enumerate(zip(nodes, leaves, strict=True)):
        if isinstance(twin, Tensor):
            given = example.leaves[position]
            with_attributes_of(twin, given)
            session.log.add(GivenTensor(twin, node, position, given, all_asked_of(twin)))
    arguments, twins = fake_arguments(example, leaves)
    wholes = [*wholes_of_state(state, adopted), *wholes_of_arguments(example, twins, leaves, nodes)]
    prepared = Prepared(adopted, example.leaves, tuple(leaves), tuple(nodes), arguments, tuple(wholes))
    for tensor, _ in prepared.differentiable():
        session.tensors.note_key(tensor)
    session.tensors.announce([whole.tensor for whole in wholes])
    return prepared


def values_deciding(
    session: Session, example: Example, prepared: Prepared, others: Iterable[tuple[fx.Node, Any]] = ()
) -> AbstractContextManager[None]:
    """Where the example decides, its values do so inside the block, and those of `others`."""
    if not example.decides:
        return nullcontext()
    inputs = zip(prepared.nodes, prepared.originals, strict=True)
    return deciding(session.recorder, [*inputs, *others], session.log.redraws)


@contextmanager
def surroundings_kept(session: Session, undoing: Undoing, lines: Lines, *, decides: bool) -> Iterator[None]:
    """Random numbers, autocast's cache, module attributes and tensors: all given back as they were."""
    subject, reads = session.run.subject, session.run.reads
    modules = kept_of((*subject.named_modules(), *subject.named_wrappers()))
    side_effects = SideEffects(session, decides=decides)
    parts = [row for row in plain_tensors(subject.state) if row.access]
    tensors = [row.tensor for row in (*subject.state, *parts)]
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    undoing.later(
        lambda: clear_autocast_cache(forced=not undoing.finished),
        session.run.objections.release,
        reads.reachable.restore,
        reads.reachable.sources.undo,
        side_effects.undo,
        lambda: undoing.finished or way_back([*modules, *reads.kept])(),
        tensors_restored([*tensors, *gradients]),
        patches_undone(),
        modes_restored(),
    )
    clear_autocast_cache()
    with changes_reported(modules, lines, session.tensors.line_of), side_effects.refused():
        yield


def mode_of(example: Example, state: Sequence[StateTensor]) -> FakeTensorMode:
    """The fake mode of a run: that of inputs or state which are fake already, else a new one."""
    leaves = [leaf for leaf in example.leaves if isinstance(leaf, Tensor)]
    return fake_mode_of([*leaves, *(row.tensor for row in state)], dynamic=example.dynamic is not None)


def _name_of(row: StateTensor) -> str:
    return state_name(row.kind, row.paths[0])


def _user_placeholders(session: Session, example: Example) -> tuple[list[Any], list[fx.Node]]:
    """Fake twins of the inputs, one for each distinct tensor, and a placeholder for every leaf."""
    leaves: list[Any] = []
    nodes: list[fx.Node] = []
    twins: dict[int, Tensor] = {}
    symbols = symbols_for(session.recorder, example)
    for leaf, name in zip(example.leaves, example.names, strict=True):
        if not isinstance(leaf, Tensor):
            number = leaf if symbols is None else symbols.number(len(leaves), leaf)
            leaves.append(number)
            nodes.append(session.recorder.constant_input(number, name))
        elif id(leaf) in twins:
            leaves.append(twins[id(leaf)])
            nodes.append(session.recorder.constant_input(twins[id(leaf)], name))
        else:
            twin, node = _twin(session, symbols, len(leaves), leaf, name)
            twins[id(leaf)] = twin
            leaves.append(twin)
            nodes.append(node)
    if symbols is not None:
        symbols.read_from(leaves, nodes)
    return leaves, nodes


def _twin(
    session: Session, symbols: Symbols | None, position: int, leaf: Tensor, name: str
) -> tuple[Tensor, fx.Node]:
    sizes = None if symbols is None else symbols.shape(position, leaf)
    if sizes is None:
        return session.recorder.fake_input(leaf, name)
    return session.recorder.sized_input(leaf, name, sizes)


def run_subject(session: Session, subject: Subject, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Call the model."""
    args, kwargs = inputs
    with session.run.places.blaming(subject.name):
        return session.recorder.functions.told(partial(subject.call, *args, **kwargs))


def _computed_loss(session: Session, loss_function: Loss, result: Any) -> Tensor:
    session.log.add(LossHolds(tensors_of_loss(loss_function, session.run.subject)))
    with session.run.places.blaming("the loss function"):
        loss = session.recorder.functions.told(loss_function, result)
    begins = beginning_of(loss_function)
    where = Place(line=str(begins) if begins else None)
    if not isinstance(loss, Tensor):
        raise InvalidLoss(
            f"the loss function returned a {type(loss).__name__}",
            where=where,
            remedy="return a scalar tensor",
        )
    if loss.numel() != 1 or loss.is_complex():
        raise InvalidLoss(
            f"the loss has shape {list(loss.shape)} and dtype {loss.dtype}, not one real number",
            where=where,
            remedy="reduce it: loss.mean() or loss.sum(); for several outputs use backward=True",
        )
    if is_composed(loss):
        raise InvalidLoss(
            f"the loss is a {type(loss).__name__}",
            where=where,
            why="the backward begins at one number",
            remedy="make a plain tensor of it: loss.full_tensor() of a DTensor",
        )
    if not loss.requires_grad:
        raise InvalidLoss(
            "the loss does not require a gradient",
            where=where,
            why="no parameter or input that requires one leads to it",
            remedy="check requires_grad of the parameters, no_grad blocks and .detach() calls",
        )
    return loss


def forward_half(session: Session, subject: Subject, prepared: Prepared, result: Any) -> Recorded:
    _refuse_results(subject, whole_leaves(result))
    session.tensors.note_wholes(result)
    leaves, spec = tree_flatten(result)
    leaves = [number_of(leaf) if _is_open_number(leaf) else leaf for leaf in leaves]
    nodes = tuple(session.tensors.held(leaf) for leaf in leaves)
    return Recorded(
        session=session,
        prepared=prepared,
        result_spec=spec,
        results=tuple(leaves),
        result_nodes=nodes,
        result_parts=tuple(parts_in(result, "output")),
        reassigned=_reassigned(session, subject, prepared),
    )


def _reassigned(
    session: Session, subject: Subject, prepared: Prepared
) -> tuple[tuple[fx.Node, fx.Node], ...]:
    """The placeholders of what another tensor has taken the place of by now, each with its node."""
    placeholders = {id(row.tensor): node for row, node in prepared.state}
    return (
        *replaced_inputs(session.recorder),
        *(
            (placeholders[id(before)], node)
            for before, after in reassigned_buffers(subject, prepared.state)
            if (node := session.tensors.note_key(after)) is not None
        ),
    )


def _is_open_number(leaf: Any) -> bool:
    return isinstance(leaf, SYMBOLIC) and not (is_recorded(leaf) or is_symbolic(leaf))


def _refuse_results(subject: Subject, leaves: Sequence[Any]) -> None:
    unknown = [leaf for leaf in leaves if is_composed(leaf) and not has_static_sizes(layout_of(leaf))]
    if unknown:
        raise UnsupportedInput(
            f"{subject.name} returned a {type(unknown[0]).__name__} with a size that varies",
            where=subject.place,
            why="the size is none of those of the tensors that it is made of, and could not be told in a run",
            remedy="return a plain tensor, or capture it with fixed sizes",
        )
    lost = [
        leaf for leaf in leaves if not isinstance(leaf, (Tensor, *SYMBOLIC)) and not is_plain_constant(leaf)
    ]
    if not lost:
        return
    for leaf in lost:
        if issubclass(type(leaf), StandIn):
            iter(leaf)  # says what the step reads
    if open_caches(lost):
        raise result_opened()
    kinds = " and a ".join(dict.fromkeys(type(leaf).__name__ for leaf in lost))
    raise UnsupportedInput(
        f"{subject.name} returned a {kinds}",
        where=subject.place,
        why="a result is a tensor, a constant, or a container that pytree knows; tensors in other objects "
        "would be lost",
        remedy=f"return tensors in a tuple or a dict, or {REGISTER}",
    )
