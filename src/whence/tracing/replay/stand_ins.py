"""Let a recorded call stand for one that is like it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, is_grad_enabled

from whence._torch.autograd.calls_not_run import Calls, linked
from whence._torch.autograd.nodes import gradient_key
from whence._torch.function_tracer import untold
from whence._torch.graphs import NameCounts, skip_names
from whence._torch.pytrees import tree_unflatten
from whence._torch.tensors import without_functions
from whence.dependence.observed import Read
from whence.schema import Phase
from whence.tracing.listening.recording import Recording
from whence.tracing.log.events import Opened
from whence.tracing.objections import Doubt
from whence.tracing.replay.records.likeness import COMPUTED, Likeness
from whence.tracing.replay.records.records import Records
from whence.tracing.replay.records.rehearsal import rehearsal_for
from whence.tracing.replay.records.template import Application, Differentiated, Rehearsal, Template
from whence.tracing.replay.replayer import Alike

Gradients = Callable[[Application, Sequence[Tensor | None]], tuple[Sequence[Tensor | None], Calls]]
"""Makes the gradients of a replayed call from those of its results."""


@dataclass(frozen=True)
class StandInWriter:
    """Writes calls that need not run: `joint` says whether the capture records the backward, too."""

    recording: Recording
    records: Records
    joint: bool

    def put(self, alike: Alike, scope: int) -> Any:
        """Let a recorded call stand for the call `scope`; returns what that returns."""
        template = alike.template
        with without_functions():
            given = self.recording, template, alike.found, scope, self._slots(template), self._gradients
            application, result = untold(applied, *given)
            self.records.applications.append(application)
            return result

    def _slots(self, template: Template) -> list[tuple[int, int]]:
        """The gradients that a call will be asked for."""
        if not is_grad_enabled() or not template.differentiable_outputs:
            return []
        if not self.joint:
            return [(position, 0) for position in template.differentiable_inputs]
        likes = [template.inside.outputs[i][1] for i in template.differentiable_outputs]
        return slots_of(template, self._rehearsal(template, likes))

    def _rehearsal(self, template: Template, tangents: Sequence[Tensor | None]) -> Rehearsal:
        return rehearsal_for(self.recording, self.records.markers, template, tangents)

    def _gradients(
        self, application: Application, tangents: Sequence[Tensor | None]
    ) -> tuple[Sequence[Tensor | None], Calls]:
        """The gradients of a replayed call, and the calls that each comes from."""
        template = application.template
        is_over = any(each.log is self.recording.log for each in application.backwards)
        if self.recording.run.running.phase is not Phase.BACKWARD or is_grad_enabled() or is_over:
            doubt = Doubt(template.kind, "the model differentiates through it")
            raise self.recording.run.objections.remembered(doubt)
        with without_functions():
            given = [tangents[i] for i in template.differentiable_outputs]
            rehearsal = self._rehearsal(template, given)
            defined = [tangent for tangent in given if tangent is not None]
            found: tuple[Sequence[Tensor | None], Calls]
            found = untold(differentiated, self.recording, application, rehearsal, defined)
            return found


def applied(
    recording: Recording,
    template: Template,
    found: Likeness,
    scope: int,
    slots: Sequence[tuple[int, int]],
    gradients: Gradients,
) -> tuple[Application, Any]:
    """Let `template` stand for the call `scope`; returns what the call returns, too."""
    graph = recording.recorder.graph
    sources = [found.tensors.get(id(tensor), tensor) for _, tensor in template.inside.inputs]
    nodes = tuple(
        recording.tensors.known(source) if position in template.noted else recording.tensors.met(source)
        for position, source in enumerate(sources)
    )
    starts, called = NameCounts.now(graph), dict(recording.recorder.calls_of_functions())
    _open_scopes(recording, template, found, scope)
    node, made = recording.recorder.stand_for(nodes, [tensor for _, tensor in template.inside.outputs])
    left_out = skip_names(graph, template.names)
    recording.recorder.count_functions(template.functions)
    results = linked(
        made,
        [tensor.requires_grad for _, tensor in template.inside.outputs],
        [sources[position] for position, _ in slots],
        lambda tangents: gradients(application, tangents),  # in the backward, when there is one
    )
    application = Application(
        template=template,
        node=node,
        given=nodes,
        scopes=range(scope, scope + len(template.scopes)),
        starts=starts,
        called=called,
        caller=recording.run.places.line(),
        slots=tuple(slots),
        keys=tuple(gradient_key(sources[position]) for position, _ in slots),
        left_out=frozenset(left_out),
        output_keys={
            position: key
            for position, result in enumerate(results)
            if (key := gradient_key(result)) is not None
        },
    )
    recording.run.objections.lend(template.kind, (*sources, *results))
    recording.run.reads.repeat(_reads(recording, template, found, scope))
    return application, _result(template, found, results)


def _open_scopes(recording: Recording, template: Template, found: Likeness, scope: int) -> None:
    """The calls inside the call, as they would have been made."""
    log, first = recording.log, template.scopes.start
    scopes = log.scopes
    before, now = scopes[first].site.path, scopes[scope].site.path
    for number in template.scopes[1:]:
        like = scopes[number]
        site = recording.run.names.repeat(like.site, before, now)
        module = None if like.module is None else found.thing(like.module)
        parent = like.parent - first + scope
        told = like.parameters, like.is_reached, like.autocast, like.switches, like.records
        log.add(Opened(site, parent, module, *told))


def _result(template: Template, found: Likeness, results: Sequence[Tensor]) -> Any:
    """What the recorded call returned, over the values of this one."""
    outputs = {node: result for (node, _), result in zip(template.inside.outputs, results, strict=True)}
    leaves = [
        outputs[node] if node in outputs else found.tensors.get(id(leaf), leaf)
        for leaf, node in zip(template.outcome.leaves, template.outcome.nodes, strict=True)
    ]
    return tree_unflatten(leaves, template.outcome.spec)


def _reads(recording: Recording, template: Template, found: Likeness, scope: int) -> Iterator[Read]:
    """What the call would have read."""
    scopes, caller = recording.log.scopes, recording.run.places.line()
    before, now = scopes[template.scopes.start].site.path, scopes[scope].site.path
    paths = {path: None if path is None else path.moved(before, now) for path in template.readers}
    rows = zip(template.reads, template.conditions.looks, template.read_by_caller, strict=True)
    things, values = found.things, found.values
    for read, look, by_caller in rows:
        held_by, name, was, is_there, module, source, _ = read
        value = values.get(id(look), was)
        if type(value) is MethodType and look.table in (None, COMPUTED):
            value = MethodType(value.__func__, found.thing(value.__self__))
        holder = things.get(id(held_by), held_by)
        yield Read(holder, name, value, is_there, paths[module], caller if by_caller else source)


def slots_of(template: Template, rehearsal: Rehearsal) -> list[tuple[int, int]]:
    """For each gradient that a call is asked for: which input it is for, and the how manieth."""
    return [
        (position, number)
        for position in template.differentiable_inputs
        for number in range(len(rehearsal.arrivals[position]))
    ]


def differentiated(
    recording: Recording, application: Application, rehearsal: Rehearsal, tangents: Sequence[Tensor]
) -> tuple[Sequence[Tensor | None], Calls]:
    """One gradient for each slot of a replayed call, and the calls that each comes from.

    An input that holds a gradient already is handed each of its gradients by itself, so that they are added
    in the order in which eager adds them.
    """
    _refuse_more(application, rehearsal)
    by_input = {position: key for (position, _), key in zip(application.slots, application.keys, strict=True)}
    whole = frozenset(
        position for position, key in by_input.items() if key not in recording.run.running.arrived
    )
    returned = tuple(slot for slot in application.slots if _is_returned(slot, rehearsal, whole))
    graph = recording.recorder.graph
    starts = NameCounts.now(graph)
    likes = [_like(slot, rehearsal, whole) for slot in returned]
    given = tuple(map(recording.tensors.known, tangents))
    node, made = recording.recorder.stand_for(given, likes, shown=likes)
    left_out = skip_names(graph, rehearsal.names)
    application.backwards.append(
        Differentiated(rehearsal, node, returned, whole, starts, recording.log, left_out)
    )
    results = dict(zip(returned, made, strict=True))
    offset = application.scopes.start - application.template.scopes.start
    scopes = tuple(
        tuple(scope + offset for scope in _scopes(slot, rehearsal, whole)) if slot in results else ()
        for slot in application.slots
    )
    return [results.get(slot) for slot in application.slots], scopes


def _refuse_more(application: Application, rehearsal: Rehearsal) -> None:
    for position, arrivals in rehearsal.arrivals.items():
        if len(arrivals) > sum(of == position for of, _ in application.slots):
            raise Doubt(application.template.kind, "its backward has more parts for these gradients")


def _is_returned(slot: tuple[int, int], rehearsal: Rehearsal, whole: frozenset[int]) -> bool:
    position, number = slot
    return number < len(rehearsal.arrivals[position]) and not (position in whole and number)


def _like(slot: tuple[int, int], rehearsal: Rehearsal, whole: frozenset[int]) -> Tensor:
    position, number = slot
    arrivals = rehearsal.arrivals[position]
    return arrivals[-1].total if position in whole else arrivals[number].like


def _scopes(slot: tuple[int, int], rehearsal: Rehearsal, whole: frozenset[int]) -> Iterator[int]:
    position, number = slot
    arrivals = rehearsal.arrivals[position]
    for arrival in arrivals if position in whole else arrivals[number : number + 1]:
        yield from arrival.scopes
