"""Run a training step once on fake tensors, and take notes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.observe.training_steps import engine_code, observed_step
from whence._torch.sizes.numbers import refuse_recorded
from whence._torch.tensors import tensors_restored
from whence.errors import Place, UnsupportedStep
from whence.program.arguments.optimizer_arguments import GroupSlot, Initial, Setting, StateSlot, Step
from whence.program.signature import Input
from whence.schema import InputKind
from whence.tracing.recording.backward import Backward
from whence.tracing.recording.partial import keeping_what_was_recorded
from whence.tracing.recording.run import (
    Recorded,
    finder_for,
    forward_half,
    know_names,
    listening,
    mode_of,
    prepare,
    run_subject,
    surroundings_kept,
)
from whence.tracing.replay.reuse import Reuse
from whence.tracing.sandbox.interrupts import Interrupts
from whence.tracing.sandbox.module_snapshot import Lines
from whence.tracing.sandbox.undo import Undoing
from whence.tracing.steps.enclosed_state import enclosed_by
from whence.tracing.steps.first_step import refuse_unbegun
from whence.tracing.steps.optimizer import RATE, Key, OptimizerEntry, Optimizing, is_plain, optimizer_restored
from whence.tracing.steps.outside_values import OutsideReads
from whence.tracing.steps.session import StepSession
from whence.tracing.target.changed_containers import containers_in, refuse_changes
from whence.tracing.target.eligibility import refuse_kinds
from whence.tracing.target.example import Example
from whence.tracing.target.placeholders import Prepared, refuse_own_parameters
from whence.tracing.target.subject import Subject


@dataclass(frozen=True)
class StepAssumptions:
    """What a run takes for given: state that a first step would make, and whether learning rates are inputs.

    `operations` are those of the optimizer in the run before, which this one must repeat. `reuse` says which
    calls may be replayed.
    """

    created: Mapping[Key, Initial] = field(default_factory=dict)
    operations: tuple[str, ...] | None = None
    fixed_rates: bool = False
    reuse: Reuse = field(default_factory=lambda: Reuse(joint=True))


@dataclass(frozen=True)
class RecordedStep(Recorded):
    """One finished run of a step; its `rows` are the inputs that belong to the optimizer."""

    session: StepSession
    step: Step = field(kw_only=True)


@dataclass(frozen=True)
class _Taken:
    """The optimizer's inputs: their rows, and where in the optimizer each is; and what there was before."""

    rows: tuple[tuple[Input, fx.Node], ...]
    states: tuple[tuple[StateSlot, OptimizerEntry], ...]
    groups: tuple[GroupSlot, ...]
    before: frozenset[Key]
    settings: tuple[Setting, ...]


def record_step(
    subject: Subject, example: Example, found: Optimizing, interrupts: Interrupts, wish: StepAssumptions
) -> RecordedStep:
    """Run the step on fake twins of its inputs; everything is as before afterwards, also after an error."""
    undoing, lines, place = Undoing(), Lines(), Place(None, subject.place.line)
    refuse_kinds(subject, differentiates=True)
    finder, mode = finder_for(record_step.__code__, engine_code()), mode_of(example, subject.state)
    session = know_names(StepSession(subject, mode, finder, lines, interrupts, wish.reuse))
    session.optimizer = found.optimizer

    def run() -> RecordedStep:
        with keeping_what_was_recorded(session), surroundings_kept(session, undoing, lines):
            tensors = [row.value for row in found.held() if isinstance(row.value, Tensor)]
            tensors += [row.value for row in found.settings() if isinstance(row.value, Tensor)]
            outside = enclosed_by(subject.call)
            undoing.later(tensors_restored(tensors), optimizer_restored(found.optimizer), outside.restore)
            reads = OutsideReads(subject, session.reads.observer)
            recorded = _recorded(session, undoing, example, found, wish, reads)
            outside.refuse_changes(place)
            step = replace(recorded.step, outside=reads.found(place))
            return replace(recorded, step=step)

    return undoing.around(run)


def _recorded(
    session: StepSession,
    undoing: Undoing,
    example: Example,
    found: Optimizing,
    wish: StepAssumptions,
    reads: OutsideReads,
) -> RecordedStep:
    subject = session.subject
    refuse_own_parameters(subject, example)
    with ExitStack() as active:
        prepared = prepare(session, example, subject.state)
        taken = _taken(session, found, wish)
        leaves = _leaves(prepared)
        session.step.leaves = {id(tensor): node for tensor, node in leaves}
        session.step.before = {id(tensor): tensor.grad for tensor, _ in leaves if tensor.grad is not None}
        undoing.later(_without_gradients(prepared))
        active.enter_context(listening(session, session))
        session.reads.outside = reads
        reads.begin()
        active.enter_context(torch.enable_grad())
        active.enter_context(observed_step(session))
        active.enter_context(session.recorder.active())
        given = containers_in(prepared.arguments)
        result = run_subject(session, subject, prepared.arguments)
        refuse_changes(subject, given, result)
        refuse_recorded(result)
        recorded = forward_half(session, subject, prepared, result)
        session.replayer.check(recorded.result_nodes)
    _refuse_changed_settings(subject, found, taken)
    refuse_unbegun(session, found, taken.before, wish.operations)
    if not session.step.runs:
        raise UnsupportedStep(
            f"{subject.name} runs no backward",
            where=subject.place,
            why="a training step is forward, backward, and what follows",
            remedy="call loss.backward() in it, or use whence.capture",
        )
    held = {row.name: getattr(recorded, row.name) for row in fields(recorded)}
    held["reassigned"] = (*recorded.reassigned, *_replaced(session, found, taken))
    held |= {"backward": _backward(session, leaves), "rows": taken.rows, "is_step": True}
    return RecordedStep(**held, step=_step(subject, session, found, taken))


def _leaves(prepared: Prepared) -> list[tuple[Tensor, fx.Node]]:
    """Everything that may hold a gradient."""
    return [pair for pair in prepared.differentiable() if pair[0].is_leaf]


def _without_gradients(prepared: Prepared) -> Callable[[], None]:
    """Fake arguments let go of theirs: what is alive after a run is held by somebody else."""
    leaves = [leaf for leaf in prepared.leaves if isinstance(leaf, Tensor)]

    def forget() -> None:
        for leaf in leaves:
            if leaf.is_leaf:
                leaf.grad = None

    return forget


def _taken(session: StepSession, found: Optimizing, wish: StepAssumptions) -> _Taken:
    """Placeholders for the state of the optimizer and for learning rates."""
    rows: list[tuple[Input, fx.Node]] = []
    states: list[tuple[StateSlot, OptimizerEntry]] = []
    _begin(session, found, wish)
    before = found.held()
    for held in before:
        if isinstance(held.value, Tensor):
            row, node = _state_input(session, held)
            initial = wish.created.get(held.place)
            rows.append((row, node))
            states.append((StateSlot(node.name, str(held.parameter.paths[0]), held.key, initial), held))
    groups = _rates(session, found, wish, rows)
    places = frozenset(held.place for held in before)
    return _Taken(tuple(rows), tuple(states), tuple(groups), places, tuple(found.settings()))


def _begin(session: StepSession, found: Optimizing, wish: StepAssumptions) -> None:
    """Give the optimizer the state that its first step makes, as fake tensors."""
    rows = {id(row.tensor): row for row in found.parameters}
    for (owner, key), initial in wish.created.items():
        like = initial.like
        made = initial.value if like is None else session.recorder.fresh([like])[0]
        found.optimizer.state[rows[owner].tensor][key] = made  # type: ignore[union-attr]


def _state_input(session: StepSession, held: OptimizerEntry) -> tuple[Input, fx.Node]:
    row = held.parameter
    node = session.recorder.adopt(held.value, "_".join(["o", *row.paths[0], held.key]))
    session.notes.inputs[node] = f"the optimizer's {held.path}"
    made = Input(
        name=node.name,
        kind=InputKind.OPTIMIZER_STATE,
        path=held.path,
        module=row.paths[0].parent,
        module_type=row.owner,
        of=str(row.paths[0]),
        value=node.meta["val"],
    )
    return made, node


def _rates(
    session: StepSession, found: Optimizing, wish: StepAssumptions, rows: list[tuple[Input, fx.Node]]
) -> Sequence[GroupSlot]:
    slots, numbers = [], set()
    for setting in found.settings():
        if setting.key != RATE or found.optimizer is None:
            continue
        name = f"o_param_groups_{setting.group}_{setting.key}"
        if isinstance(setting.value, Tensor):
            node = session.recorder.adopt(setting.value, name)
            value: Any = node.meta["val"]
        elif isinstance(setting.value, float) and not wish.fixed_rates:
            number, node = session.recorder.number_input(name)
            found.optimizer.param_groups[setting.group][RATE] = number
            numbers.add(node)
            value = setting.value
        else:
            continue
        session.notes.inputs[node] = setting.path
        rows.append((Input(node.name, InputKind.OPTIMIZER_STATE, setting.path, value=value), node))
        slots.append(GroupSlot(node.name, setting.group, setting.key))
    session.step.rates = frozenset(numbers)
    return slots


def _refuse_changed_settings(subject: Subject, found: Optimizing, taken: _Taken) -> None:
    now = {row.path: row.value for row in found.settings()}
    before = {row.path: row.value for row in taken.settings}
    names = dict.fromkeys((*before, *now))
    changed = [
        name for name in names if name not in now or name not in before or not _same(now[name], before[name])
    ]
    if changed:
        raise UnsupportedStep(
            f"the step changes {', '.join(changed)}",
            where=Place(None, subject.place.line),
            why="that is a value of Python's, and a program changes tensors",
            remedy="do it after the captured step, outside it: scheduler.step(), for example",
        )


def _same(left: Any, right: Any) -> bool:
    return left is right or (is_plain(left) and type(left) is type(right) and bool(left == right))


def _replaced(session: StepSession, found: Optimizing, taken: _Taken) -> list[tuple[fx.Node, fx.Node]]:
    """State that the optimizer put another tensor in the place of."""
    nodes = {row.name: node for row, node in taken.rows}
    now = {held.place: held.value for held in found.held()}
    pairs = []
    for slot, held in taken.states:
        value = now[held.place]
        if value is not held.value and isinstance(value, Tensor):
            pairs.append((nodes[slot.input], session.known(value)))
    return pairs


def _backward(session: StepSession, leaves: Sequence[tuple[Tensor, fx.Node]]) -> Backward:
    """Gradients that are left, and what the passes began with."""
    left = [
        (node, session.known(gradient))
        for tensor, node in leaves
        if (gradient := tensor.grad) is not None and gradient is not session.step.before.get(id(tensor))
    ]
    roots = tuple((seed, seed) for run in session.step.runs for _, seed in run.roots)
    return Backward(
        roots=roots, targets=tuple(node for node, _ in left), gradients=tuple(node for _, node in left)
    )


def _step(subject: Subject, session: StepSession, found: Optimizing, taken: _Taken) -> Step:
    rows, notes = subject.state, session.step
    names = {id(row.tensor): str(row.paths[0]) for row in rows}
    gone = {id(row.tensor) for row in rows if row.tensor.grad is None} & (notes.cleared | notes.arrived)
    inputs = {(slot.group, slot.key) for slot in taken.groups}
    return Step(
        call=subject.call,
        optimizer=found.optimizer,
        groups=tuple(tuple(str(row.paths[0]) for row in group) for group in found.groups),
        settings=tuple(
            row
            for row in taken.settings
            if (row.group, row.key) not in inputs and not isinstance(row.value, Tensor)
        ),
        states=tuple(slot for slot, _ in taken.states),
        numbers=taken.groups,
        without_gradient=frozenset(names[key] for key in notes.assumed if key in names),
        cleared=frozenset(names[key] for key in gone),
    )
