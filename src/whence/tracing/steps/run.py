"""Run a training step once on fake tensors, and write the log."""

from collections import Counter as Counted
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.autograd.replaced_data import lies_under_another
from whence._torch.observe.attribute_reads import own_attributes
from whence._torch.observe.hooks import gradient_hooks, hooks_on_gradient
from whence._torch.observe.training_steps import (
    all_members_of,
    engine_code,
    method_of,
    methods_of,
    observed_step,
)
from whence._torch.pytrees import TreeSpec, tree_flatten, tree_unflatten
from whence._torch.refusals import data_replaced
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence._torch.tensors import tensors_restored
from whence.errors import Place, SideEffect, UnsupportedStep
from whence.program.arguments.containers import containers_in
from whence.program.arguments.optimizer_arguments import Outside, Step, is_number
from whence.provenance import Source
from whence.tracing.attribution.wrapper_subclasses import Composed, made_otherwise
from whence.tracing.reads.attribute_reads import tensor_attributes
from whence.tracing.recording.backward import Backward
from whence.tracing.recording.partial import keeping_what_was_recorded
from whence.tracing.recording.run import (
    Recorded,
    attribute_tensor_names,
    forward_half,
    listening,
    mode_of,
    prepare,
    run_subject,
    state_of_run,
    surroundings_kept,
    values_deciding,
)
from whence.tracing.sandbox.module_snapshot import Lines, changes_reported
from whence.tracing.sandbox.undo import Interrupts, Undoing
from whence.tracing.steps.counters import Counter, GroupKey, changed_settings, first_guess, replaced_numbers
from whence.tracing.steps.enclosed_state import Enclosed, enclosed_by, refuse_changed
from whence.tracing.steps.first_step import (
    StepAssumptions,
    found_numbers,
    refuse_another_first_step,
    refuse_changes_of_its_own,
    refuse_unbegun,
)
from whence.tracing.steps.host.host_run import HostOutcome, HostRun
from whence.tracing.steps.inputs import Taken, beginnings, gradients_of_before, take_inputs
from whence.tracing.steps.optimizer import Optimizing, optimizer_restored, own_states
from whence.tracing.steps.outside_values import OutsideReads
from whence.tracing.steps.session import GradientRead, StepSession, new_step_session
from whence.tracing.target.changed_containers import changed_and_returned
from whence.tracing.target.eligibility import refuse_kinds
from whence.tracing.target.example import Example
from whence.tracing.target.placeholders import Prepared, refuse_own_parameters, refuse_turned
from whence.tracing.target.subject import Subject


@dataclass(frozen=True)
class RecordedStep(Recorded):
    """One finished run of a step; its `rows` are the inputs that belong to the optimizer, `outside` what it
    read around itself."""

    session: StepSession
    step: Step = field(kw_only=True)
    outside: tuple[tuple[Outside, Source | None], ...] = field(default=(), kw_only=True)


def record_step(
    subject: Subject, example: Example, found: Optimizing, interrupts: Interrupts, wish: StepAssumptions
) -> RecordedStep:
    """Run the step on fake twins of its inputs; everything is as before afterwards, also after an error."""
    undoing, lines, place = Undoing(), Lines(), Place(None, subject.place.line)
    refuse_kinds(subject, differentiates=True)
    run_of_step = state_of_run(subject, lines, interrupts, wish.reuse, record_step.__code__, engine_code())
    names, mode = attribute_tensor_names(subject), mode_of(example, subject.state)
    session = new_step_session(run_of_step, mode, names, wish.reuse, found, example.elsewhere)
    outside = enclosed_by(subject.call)
    outside.look_at_modules(type(subject.roots[0][1]).__name__, subject.named_modules())
    outside.look_at(tensor_attributes(subject.state))
    host = HostRun(outside, wish.host, session)
    flags, hooks = _flags(subject), _hooks(subject)
    undoing.later(outside.way_back())  # gone last: others look at these things when stand-ins are there

    def run() -> RecordedStep:
        with (
            keeping_what_was_recorded(session),
            surroundings_kept(session, undoing, lines, decides=example.decides),
            changes_reported(outside.objects, lines, session.tensors.line_of, of_objects=True),
        ):
            tensors = [row.value for row in found.entries() if isinstance(row.value, Tensor)]
            tensors += [row.value for row in found.settings() if isinstance(row.value, Tensor)]
            own = [*own_states(found.optimizer)]
            undoing.later(tensors_restored(tensors), optimizer_restored(found.optimizer), outside.restore)
            undoing.later(session.step.scheduling.undo)
            called = [hook for row in hooks for hook in row.value]
            sources = session.run.reads.reachable.sources
            reads = OutsideReads(session, outside, found, called)

            def take() -> Taken:
                held = take_inputs(session, found, wish)
                gradients = gradients_of_before(session) if wish.takes_gradients else ()
                rows = (*held.rows, *gradients, *host.begin())
                return replace(held, rows=rows, twins=tuple(host.twins))

            inputs, recorded = _run(session, undoing, example, take, reads)
            sources.undo()
            SideEffect.refuse(sources.faults())  # or the next run would seem to be another step
            session.step.scheduling.finish(fixed_rates=wish.fixed_rates)
            now = _flags(subject)
            turned = [path for path, flag in flags.items() if now.get(path, flag) is not flag]
            turned += [row.path for row in hooks if row.now() != row.value]
            refuse_changed(turned, place, always=True)
            refuse_turned(example, recorded.prepared, place)
            outcome, settled = host.settle(place), replace(wish, host=wish.host.settled)
            lines.made_anew |= {*_places_put(subject, outside, outcome)}
            refuse_changes_of_its_own(own, found, settled, place)
            recorded = _recorded(session, found, settled, inputs, recorded, outcome)
            actors = (*reads.actors, *_methods(found.optimizer))
            step = replace(recorded.step, hooked=_hooks_in_words(subject), actors=actors)
            alone = [*hooks, *session.step.gradients_of_others()]
            rows = (*((row, None) for row in alone), *reads.found(place))
            refuse_another_first_step(session, found, wish.operations, recorded.results)
            return replace(recorded, step=step, outside=rows)

    with session.ended_by_errors():
        return undoing.around(run)


def _methods(optimizer: object) -> Iterator[Outside]:
    """What the step calls of its optimizers."""
    for member in all_members_of(optimizer):
        for name in methods_of(member):
            path, way = f"{type(member).__name__}.{name}", partial(method_of, name)
            yield Outside(path, member, (way,), way(member))


def _flags(subject: Subject) -> dict[str, bool]:
    """Which modules train, and which parameters get gradients: a program leaves both as they are."""
    modules = {str(path.child("training")): module.training for path, module in subject.named_modules()}
    rows = (row for row in subject.state if row.is_parameter)
    return modules | {f"{row.paths[0]}.requires_grad": row.tensor.requires_grad for row in rows}


def _places_put(subject: Subject, outside: Enclosed, outcome: HostOutcome) -> Iterator[tuple[int, Any]]:
    """The attributes of modules, and of objects that they hold, that a run of the program sets, and entries
    of containers."""
    things = [*(module for _, module in subject.named_modules()), *(row.module for row in outside.objects)]
    holders = {id(own_attributes(thing)): id(thing) for thing in things}
    places = [*(row.place for row in outcome.effects), *(row.place for row in outcome.counted)]
    yield from ((holders.get(id(at.holder), id(at.holder)), at.key) for at in places)


def _hooks(subject: Subject) -> list[Outside]:
    """The hooks that autograd calls when gradients of parameters arrive."""
    return [
        Outside(f"the gradient hooks of {row.paths[0]}", row.tensor, (hooks_on_gradient,), hooks)
        for row in subject.state
        if (hooks := hooks_on_gradient(row.tensor))
    ]


def _hooks_in_words(subject: Subject) -> tuple[tuple[str, tuple[str, ...]], ...]:
    rows = ((str(row.paths[0]), tuple(gradient_hooks(row.tensor))) for row in subject.state)
    return tuple((name, words) for name, words in rows if words)


def _run(
    session: StepSession, undoing: Undoing, example: Example, take: Callable[[], Taken], reads: OutsideReads
) -> tuple[Taken, Recorded]:
    subject = session.run.subject
    refuse_own_parameters(subject, example)
    with ExitStack() as active:
        prepared = prepare(session, example, subject.state)
        taken = take()
        numbers = session.step.counting.known.items()
        begun = [*numbers, *beginnings(taken)] if example.decides else []
        wholes = [(whole.tensor, whole.nodes[0]) for whole in _wholes(prepared)]
        leaves = [*_gradient_leaves(prepared), *wholes]
        session.step.begin(leaves, (row.tensor for row in subject.state))
        undoing.later(_without_gradients(prepared))
        active.enter_context(listening(session, session.calls, prepared, reads))
        reads.begin(taken.twins)
        active.enter_context(torch.enable_grad())
        active.enter_context(observed_step(session.passes))
        active.enter_context(session.branches.recording(session.recorder))
        active.enter_context(values_deciding(session, example, prepared, begun))
        given = containers_in(prepared.arguments)
        result = run_subject(session, subject, prepared.arguments)
        reads.imported()
        if session.step.scheduling.calls:
            leaves, spec = tree_flatten(result)
            result = tree_unflatten([*map(session.step.scheduling.deferred, leaves)], spec)
        returned = changed_and_returned(subject, given, result)
        recorded = replace(forward_half(session, subject, prepared, result), returned=returned)
        session.replay.check(recorded.result_nodes)
    return taken, recorded


def _recorded(
    session: StepSession,
    found: Optimizing,
    wish: StepAssumptions,
    taken: Taken,
    recorded: Recorded,
    host: HostOutcome,
) -> RecordedStep:
    """What was recorded, with the optimizer's part; raises `AnotherAttempt` where more has to be assumed."""
    subject, leaves = session.run.subject, _gradient_leaves(recorded.prepared)
    counted = _advanced(session, found, taken)
    refuse_unbegun(session, found, taken.before, counted, wish, recorded.results)
    held = {row.name: getattr(recorded, row.name) for row in fields(recorded)}
    held["reassigned"] = (*recorded.reassigned, *_replaced(session, found, taken), *host.pairs)
    held["kept"] = host.kept
    backward = _backward(session, leaves, _wholes(recorded.prepared))
    held |= {"backward": backward, "rows": taken.rows, "is_step": True}
    results = frozenset(node for node in recorded.result_nodes if node is not None)
    step = _step(subject, session, found, taken, results)
    return RecordedStep(
        **held, step=replace(step, counted=host.counted, effects=host.effects, calls=host.calls)
    )


def _gradient_leaves(prepared: Prepared) -> list[tuple[Tensor, fx.Node]]:
    """Everything that may hold a gradient."""
    return [pair for pair in prepared.differentiable() if pair[0].is_leaf]


def _wholes(prepared: Prepared) -> list[Composed]:
    """Those of them that are made of other tensors."""
    return [whole for whole in prepared.wholes if whole.tensor.is_leaf and whole.tensor.requires_grad]


def _without_gradients(prepared: Prepared) -> Callable[[], None]:
    """Fake arguments let go of theirs: what is alive after a run is held by somebody else."""
    leaves = [leaf for leaf in prepared.leaves if isinstance(leaf, Tensor)]

    def forget() -> None:
        for leaf in leaves:
            if leaf.is_leaf:
                leaf.grad = None

    return forget


def _advanced(session: StepSession, found: Optimizing, taken: Taken) -> dict[GroupKey, Counter]:
    """The numbers in groups that the step advances; raises `UnsupportedStep` for other values it changes."""
    inputs, counting = {(slot.group, slot.key) for slot in taken.groups}, session.step.counting
    rows = [
        (row, then)
        for row, then in changed_settings(taken.settings, found.settings())
        if (row.group, row.key) not in inputs
    ]
    counts = ((row, then) for row, then in rows if then is not None and is_number(then.value))
    _refuse_other_kinds([row.path for row, _ in counts if _is_of_numpy(row.value)], session)
    values = {row.path: counting.value(row.value) for row, _ in rows if is_number(row.value)}
    others = [
        row.path
        for row, then in rows
        if (
            values.get(row.path) is None
            if then is None
            else not (is_number(row.value) and is_number(then.value))
        )
    ]
    if others:
        raise UnsupportedStep(
            f"the step changes {', '.join(others)}",
            where=Place(None, session.run.subject.place.line),
            why="that is a value of Python's, and a program changes tensors and numbers",
            remedy="do it after the captured step, outside it: scheduler.step(), for example; where the "
            "optimizer does so in its first step alone, take one before the capture",
        ).in_first_step()
    return {
        (row.group, row.key): Counter() if then is not None else first_guess(values[row.path])
        for row, then in rows
    }


def _is_of_numpy(value: object) -> bool:
    return isinstance(value, Number) and not is_number(value) and not isinstance(value, bool)


def _replaced(session: StepSession, found: Optimizing, taken: Taken) -> list[tuple[fx.Node, fx.Node]]:
    """State that the optimizer put another tensor in the place of, and numbers that it advanced."""
    nodes = {row.name: node for row, node in taken.rows}
    now = {held.place: held.value for held in found.entries(None)}
    pairs = []
    for slot, held in taken.states:
        value = now[held.place]
        if value is not held.value and isinstance(value, Tensor):
            if nodes[slot.input].users and lies_under_another(session.recorder, value):
                why = f"{held.path} lies there, too, and the next step reads it"
                raise data_replaced(why, session.run.places.here())
            pairs.append((nodes[slot.input], session.tensors.known(value)))
    places = found_numbers(found)
    _refuse_other_kinds([path for path in session.step.counting.inputs if path not in places], session)
    settings = {(row.group, row.key): row.value for row in found.settings()}
    for held_in in taken.groups:
        value = settings.get((held_in.group, held_in.key))
        if isinstance(value, Tensor) and (node := session.tensors.known(value)) is not nodes[held_in.input]:
            pairs.append((nodes[held_in.input], node))
    return [*pairs, *replaced_numbers(session.step.counting, places, session.recorder.constant_number)]


def _refuse_other_kinds(paths: Sequence[str], session: StepSession) -> None:
    """Raise `UnsupportedStep` where the step has put something else in the place of numbers."""
    if paths:
        raise UnsupportedStep(
            f"the step puts something else than a number of Python's into {', '.join(paths)}",
            where=Place(None, session.run.subject.place.line),
            why="a number was there when it began, and is an input of the program; NumPy's are no others",
            remedy="put float(number) there",
        )


_CLEARED = "clear it in the step: call optimizer.zero_grad() at its end"


def _backward(
    session: StepSession, leaves: Sequence[tuple[Tensor, fx.Node]], wholes: Sequence[Composed]
) -> Backward:
    """Gradients that are left, and what the passes began with."""
    found = [(node, gradient) for tensor, node in leaves if (gradient := _left(session, tensor)) is not None]
    for tensor, node in leaves:
        if is_composed(tensor.grad) and id(tensor) not in session.step.taken:
            raise made_otherwise(session.log.inputs[node], tensor, tensor.grad, _CLEARED)
    structures: dict[str, TreeSpec] = {}
    for whole in wholes:
        if (gradient := _left(session, whole.tensor)) is not None:
            parts, spec = tree_flatten(gradient)
            if len(parts) > len(whole.nodes):
                raise made_otherwise(whole.path, whole.tensor, gradient, _CLEARED)
            found += zip(whole.nodes, parts, strict=False)
            structures[whole.path] = spec
    left = [(node, session.tensors.known(gradient)) for node, gradient in found]
    for tensor, node in leaves:
        if (zeros := session.step.zeroed.get(id(tensor))) is not None and tensor.grad is not zeros():
            raise GradientRead(session.log.inputs[node], session.run.places.here())
    _refuse_one_for_several(session, leaves)
    roots = tuple((seed, seed) for run in session.step.runs for _, seed in run.roots)
    return Backward(
        roots=roots,
        targets=tuple(node for node, _ in left),
        gradients=tuple(node for _, node in left),
        structures=structures,
    )


def _left(session: StepSession, tensor: Tensor) -> Tensor | None:
    """The gradient that a tensor has, unless it had that before."""
    return None if tensor.grad is session.step.before.get(id(tensor)) else tensor.grad


def _refuse_one_for_several(session: StepSession, leaves: Sequence[tuple[Tensor, fx.Node]]) -> None:
    """Raise `UnsupportedStep` where one tensor is the gradient of several: a run leaves each its own."""
    counts = Counted(id(tensor.grad) for tensor, _ in leaves if tensor.grad is not None)
    shared = [node for tensor, node in leaves if counts[id(tensor.grad)] > 1]
    if shared:
        names = ", ".join(session.log.inputs.get(node, node.name) for node in shared)
        raise UnsupportedStep(
            f"one tensor is the .grad of {names}",
            where=Place(None, session.run.subject.place.line),
            why="what the next step adds to one of them it would add to all, and a run leaves each its own",
            remedy="give each a copy: tensor.grad.clone()",
        )


def _step(
    subject: Subject, session: StepSession, found: Optimizing, taken: Taken, results: frozenset[fx.Node]
) -> Step:
    rows, noted = subject.state, session.step
    names = {id(row.tensor): str(row.paths[0]) for row in rows}
    gone = {id(row.tensor) for row in rows if row.tensor.grad is None} & (noted.cleared | noted.arrived)
    inputs = {(slot.group, slot.key) for slot in taken.groups}
    inputs |= {(slot.group, slot.key) for slot in taken.cycled}
    return Step(
        call=subject.call,
        optimizer=found.optimizer,
        groups=tuple(tuple(str(row.paths[0]) for row in group) for group in found.groups),
        settings=(
            *found.own(),
            *(
                row
                for row in taken.settings
                if (row.group, row.key) not in inputs and not isinstance(row.value, Tensor)
            ),
        ),
        states=tuple(slot for slot, _ in taken.states),
        frames=tuple(taken.before.frames.values()),
        numbers=taken.groups,
        cycled=taken.cycled,
        with_gradient=frozenset(names[key] for key in (*noted.zeroed, *noted.taken) if key in names),
        gradients=tuple((node.name, names[key]) for key, nodes in noted.taken.items() for node in nodes),
        without_gradient=frozenset(
            names[key]
            for key in noted.assumed
            if key in names and not noted.needs_no_gradient(key, session.log, results)
        ),
        cleared=frozenset(names[key] for key in gone),
        empty=taken.empty,
        touched=tuple(taken.before.touched.items()),
    )
