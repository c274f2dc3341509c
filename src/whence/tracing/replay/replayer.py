"""Decide, call by call, whether a module has to run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from whence._torch.autograd import (
    BackwardListener,
    GradientKey,
    gradient_key,
    inside_backward,
    next_sequence_number,
    run_part_of_backward,
)
from whence._torch.graphs import NameCounts, named_apart, skip_names
from whence._torch.modes import modes_now
from whence._torch.module_calls import ObservedCall
from whence._torch.recording import Recorder
from whence._torch.saving import packs_what_is_saved
from whence._torch.tensors import without_functions, writes_to
from whence._torch.trees import TreeSpec, tree_flatten, tree_unflatten
from whence.program.observed import Read
from whence.provenance import ModulePath, Source
from whence.schema import Phase
from whence.tracing.callnames import CallNames
from whence.tracing.following import Gradients, follow
from whence.tracing.notes import Notes, Scope
from whence.tracing.reads import Reads
from whence.tracing.replay.differentiating import linked
from whence.tracing.replay.facts import facts_of
from whence.tracing.replay.likeness import COMPUTED, Different, Likeness, Look, held, likeness
from whence.tracing.replay.reuse import Reuse
from whence.tracing.replay.template import Application, Arriving, Counts, Differentiated, Doubt, Rehearsal, Template
from whence.tracing.replay.trial import (
    SMALL,
    Outcome,
    Seen,
    Trial,
    Unfit,
    attempted,
    attributes_below,
    tensors_in,
)
from whence.tracing.replay.variables import Variables, seeing_functions

_TRIALS_WITHOUT_USE = 4
"""How many recorded calls of a class may find no other call that is like them, before no more are watched."""


class Host(BackwardListener, Protocol):
    """The capture that is going on."""

    notes: Notes
    recorder: Recorder
    names: CallNames
    reads: Reads
    phase: Phase
    arrived: set[GradientKey]

    def apart(self) -> Any:
        """A context in which what is recorded is noted apart."""

    def known(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor."""

    def reading(self) -> tuple[ModulePath | None, Source | None]:
        """The module that is running, and the user's line."""

    def is_user(self, code: Any) -> bool:
        """Whether code is the user's."""


@dataclass
class Kind:
    """What is known of the modules of one class.

    `templates` are recorded calls, newest last. `reasons` are why calls were not replayed, `closed` says that
    no more will be tried, `unused` how many templates were made since one was last used.
    """

    instances: int
    calls: int = 0
    replayed: int = 0
    unused: int = 0
    closed: bool = False
    templates: list[Template] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        """A call had to run, for this reason."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


class Replayer:
    """Watches the first call of what may be called again alike, and answers for those that are."""

    def __init__(self, host: Host, modules: Sequence[nn.Module], reuse: Reuse) -> None:
        self._host = host
        self._reuse = reuse
        self.kinds: dict[type, Kind] = {}
        for module in {id(module): module for module in modules}.values():
            self.kinds.setdefault(type(module), Kind(0)).instances += 1
        self.applications: list[Application] = []
        self.templates: list[Template] = []
        self.handed_on: tuple[tuple[int, ...], ...] | None = None
        self.markers: list[fx.Node] = []
        self.left_out: set[str] = set()
        self._trials: list[Trial] = []

    def _marker(self, values: tuple[fx.Node, ...]) -> fx.Node:
        marker = self._host.recorder.marker(values)
        self.markers.append(marker)
        return marker

    @contextmanager
    def call(
        self, module: nn.Module, scope: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[ObservedCall]:
        """A call of a module: with its answer if it is like one that was recorded, else watched if that pays."""
        kind = self.kinds.setdefault(type(module), Kind(1))
        kind.calls += 1
        if kind.closed or not self._reuse.wanted or kind.instances == kind.calls == 1:
            yield ObservedCall(_ignore)
            return
        if type(module) in self._reuse.without:
            kind.refuse(self._reuse.without[type(module)])
            yield ObservedCall(_ignore)
            return
        leaves, spec = tree_flatten((args, kwargs))
        with without_functions():
            modes = modes_now()
            answer = self._answer(kind, module, scope, spec, leaves, modes)
        if answer is not None:
            yield ObservedCall(_ignore, answer)
        elif kind.closed or (reason := self._objection(module)):
            if not kind.closed:
                kind.refuse(reason)
            yield ObservedCall(_ignore)
        else:
            yield from self._watched(kind, module, scope, (args, kwargs), spec, leaves, modes)

    def _objection(self, module: nn.Module) -> str:
        """Why a call cannot be watched where it is; empty if it can."""
        if packs_what_is_saved():
            return "a checkpoint, or another hook, sees what autograd saves"
        if inside_backward():
            return "it is called in a backward pass"
        return ""

    # --- watching ------------------------------------------------------------------------------------

    def _watched(
        self,
        kind: Kind,
        module: nn.Module,
        scope: int,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        spec: TreeSpec,
        leaves: Sequence[Any],
        modes: tuple[Any, ...],
    ) -> Iterator[ObservedCall]:
        """Watch a call that runs; afterwards it is a template, or there is a reason why not."""
        host = self._host
        begin = self._marker(())
        starts, called = NameCounts.now(host.recorder.graph), dict(host.recorder.calls_of_functions())
        with without_functions():
            trial = Trial(
                module=module,
                scope=scope,
                start=len(host.notes.order),
                spec=spec,
                leaves=tuple(leaves),
                nodes=tuple(host.recorder.node_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves),
                modes=modes,
                seen=Seen(),
                variables=Variables(host.is_user),
                caller=host.reading()[1],
                attributes=attributes_below(module),
            )
        moment, layouts = next_sequence_number(), len(host.notes.layouts_read)
        results: list[Any] = []
        self._trials.append(trial)
        try:
            with host.reads.watched(trial.seen.read), self._seeing_functions():
                yield ObservedCall(results.append)
        finally:
            self._trials.remove(trial)
        with without_functions():
            try:
                template = self._template(trial, results[0], given, moment, begin, layouts, starts, called)
            except Unfit as unfit:
                self._refused(kind, str(unfit))
            else:
                kind.templates.append(template)
                self.templates.append(template)
                kind.unused += 1
                kind.closed = kind.unused > _TRIALS_WITHOUT_USE

    @contextmanager
    def _seeing_functions(self) -> Iterator[None]:
        """All calls that are being watched are told of functions that run, by one profiler."""
        if len(self._trials) > 1:
            yield
            return
        with seeing_functions(lambda frame: [trial.variables.met(frame) for trial in self._trials]):
            yield

    def _refused(self, kind: Kind, reason: str) -> None:
        kind.refuse(reason)
        kind.closed = reason == SMALL or sum(kind.reasons.values()) >= _TRIALS_WITHOUT_USE

    def unfit(self, reason: str) -> None:
        """Something has happened that is not for other calls."""
        for trial in self._trials:
            trial.seen.faults.append(reason)

    def _template(
        self,
        trial: Trial,
        result: Any,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        moment: int,
        begin: fx.Node,
        layouts: int,
        starts: NameCounts,
        called: Counts,
    ) -> Template:
        host = self._host
        graph, notes = host.recorder.graph, host.notes
        leaves, spec = tree_flatten(result)
        nodes = tuple(host.recorder.node_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves)
        outcome = Outcome(spec, tuple(leaves), nodes)
        tensors = self._tensors_behind(trial)
        conditions, border = attempted(trial, outcome, given, notes, tensors, host.reads.kept)
        if not self._reuse.joint and any(notes.marks[node].cut for node in notes.order[trial.start :]):
            raise Unfit("a part of it runs without gradients")
        crossing = (*(node for node, _ in border.inputs), *(node for node, _ in border.outputs))
        inside = notes.order[trial.start :]
        return Template(
            conditions=conditions,
            inside=border,
            outcome=outcome,
            begin=begin,
            border=self._marker(crossing),
            scopes=range(trial.scope, len(notes.scopes)),
            moment=moment,
            starts=starts,
            names=NameCounts.now(graph).since(starts),
            called=called,
            functions=_grown(called, host.recorder.calls_of_functions()),
            keys={node: notes.keys[node] for node in inside if node in notes.keys},
            recorded=tuple(inside),
            layouts=range(layouts, len(notes.layouts_read)),
            caller=trial.caller,
            reads=tuple(read for read, _ in trial.seen.reads.values()),
        )

    def _tensors_behind(self, trial: Trial) -> dict[fx.Node, Tensor]:
        """The arguments and attributes that nodes stand for."""
        values = [read.value for read, _ in trial.seen.reads.values()]
        found = {node: tensor for tensor in tensors_in(values) if (node := self._host.recorder.node_of(tensor))}
        pairs = zip(trial.nodes, trial.leaves, strict=True)
        return found | {node: leaf for node, leaf in pairs if node is not None}

    # --- replaying -----------------------------------------------------------------------------------

    def _answer(
        self,
        kind: Kind,
        module: nn.Module,
        scope: int,
        spec: TreeSpec,
        leaves: Sequence[Any],
        modes: tuple[Any, ...],
    ) -> tuple[Any] | None:
        """The result of a call that is like a recorded one."""
        if not kind.templates or self._objection(module):
            return None
        different = ""
        for template in reversed(kind.templates):
            try:
                found = likeness(template.conditions, module, spec, leaves, modes)
                answer = self._replay(template, found, scope)
            except Different as difference:
                different = different or str(difference)
            except Unfit as unfit:
                kind.templates.remove(template)
                self._refused(kind, str(unfit))
                return None
            else:
                kind.replayed += 1
                kind.unused = 0
                return answer
        kind.refuse(different)
        return None

    def _replay(self, template: Template, found: Likeness, scope: int) -> tuple[Any]:
        sources = [found.tensors.get(id(tensor), tensor) for _, tensor in template.inside.inputs]
        nodes = tuple(self._host.known(source) for source in sources)
        slots = self._slots(template)
        graph, functions = self._host.recorder.graph, self._host.recorder.calls_of_functions()
        starts, called = NameCounts.now(graph), dict(functions)
        application = Application(
            template, range(scope, scope + len(template.scopes)), starts, called, self._host.reading()[1]
        )
        self._open_scopes(template, scope)
        likes = [tensor for _, tensor in template.inside.outputs]
        application.node, results = self._host.recorder.stand_for(nodes, likes)
        self.left_out |= skip_names(graph, template.names)
        _add(functions, template.functions)
        application.slots = slots
        sources_of_gradients = [sources[position] for position, _ in slots]
        application.keys = [gradient_key(source) for source in sources_of_gradients]
        results = linked(
            results,
            [tensor.requires_grad for tensor in likes],
            sources_of_gradients,
            partial(self._differentiate, application),
        )
        application.output_keys = {
            i: key for i, result in enumerate(results) if (key := gradient_key(result)) is not None
        }
        application.watched = [(tensor, writes_to(tensor)) for tensor in (*sources, *results)]
        self._host.reads.repeat(self._reads(template, found, scope))
        for trial in self._trials:
            trial.variables.found.update({(id(v), v.name): v for v in template.conditions.variables})
        self.applications.append(application)
        return (_result(template, found, results),)

    def _slots(self, template: Template) -> list[tuple[int, int]]:
        """For each gradient that the call will be asked for: which input it is for, and the how manieth."""
        if not torch.is_grad_enabled():
            return []
        if not self._reuse.joint:
            return [(position, 0) for position in template.differentiable_inputs]
        likes = [template.inside.outputs[i][1] for i in template.differentiable_outputs]
        if not likes:
            return []
        rehearsal = self._rehearsal(template, likes)
        return [
            (position, number)
            for position in template.differentiable_inputs
            for number in range(len(rehearsal.arrivals.get(position, ())))
        ]

    def _open_scopes(self, template: Template, scope: int) -> None:
        notes, names = self._host.notes, self._host.names
        first = template.scopes.start
        before, now = notes.scopes[first].site.path, notes.scopes[scope].site.path
        for number in template.scopes[1:]:
            like = notes.scopes[number]
            site = names.repeat(like.site, before, now)
            notes.scopes.append(Scope(site, like.parent - first + scope, None, like.parameters))

    def _reads(self, template: Template, found: Likeness, scope: int) -> Iterator[Read]:
        scopes = self._host.notes.scopes
        before, now = scopes[template.scopes.start].site.path, scopes[scope].site.path
        caller = self._host.reading()[1]
        for read, look in zip(template.reads, template.conditions.looks, strict=True):
            again = repeated_read(read, look, found, before, now)
            yield replace(again, source=caller) if read.source == template.caller else again

    # --- differentiating -----------------------------------------------------------------------------

    def _differentiate(
        self, application: Application, tangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The gradients of a replayed call."""
        template = application.template
        kind = type(template.conditions.module)
        if self._host.phase is not Phase.BACKWARD or torch.is_grad_enabled() or application.backward is not None:
            raise Doubt(kind, "the model differentiates through it")
        with without_functions():
            given = [tangents[i] for i in template.differentiable_outputs]
            rehearsal = self._rehearsal(template, given)
            return self._handed_on(application, rehearsal, [tensor for tensor in given if tensor is not None])

    def _handed_on(
        self, application: Application, rehearsal: Rehearsal, tangents: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        host, kind = self._host, type(application.template.conditions.module)
        by_input = dict(zip((position for position, _ in application.slots), application.keys, strict=True))
        whole = frozenset(position for position, key in by_input.items() if key not in host.arrived)
        returned, likes = list[tuple[int, int]](), list[Tensor]()
        scopes = list[tuple[int, ...]]()
        offset = application.scopes.start - application.template.scopes.start
        for position, number in application.slots:
            arrivals = rehearsal.arrivals.get(position, ())
            if number >= len(arrivals) or (position in whole and number):
                scopes.append(())
                continue
            parts = arrivals if position in whole else arrivals[number : number + 1]
            returned.append((position, number))
            likes.append(arrivals[-1].total if position in whole else arrivals[number].like)
            scopes.append(tuple(scope + offset for part in parts for scope in part.scopes))
        if any(len(arrivals) > sum(p == position for p, _ in application.slots) for position, arrivals in rehearsal.arrivals.items()):
            raise Doubt(kind, "its backward has more parts than were expected")
        graph = host.recorder.graph
        starts = NameCounts.now(graph)
        nodes = tuple(host.known(tangent) for tangent in tangents)
        node, results = host.recorder.stand_for(nodes, likes)
        self.left_out |= skip_names(graph, rehearsal.names)
        application.backward = Differentiated(rehearsal, node, tuple(returned), whole, starts)
        self.handed_on = tuple(scopes)
        made = dict(zip(returned, results, strict=True))
        return [made.get(slot) for slot in application.slots]

    def _rehearsal(self, template: Template, tangents: Sequence[Tensor | None]) -> Rehearsal:
        key = tuple(None if tangent is None else facts_of(tangent)[1:6] for tangent in tangents)
        if key not in template.rehearsals:
            template.rehearsals[key] = self.rehearsed(template, tangents)
        return template.rehearsals[key]

    def rehearsed(self, template: Template, likes: Sequence[Tensor | None]) -> Rehearsal:
        """Run the backward of a recorded call for gradients like these, apart from everything else."""
        host = self._host
        graph = host.recorder.graph
        inputs = [template.inside.inputs[i][1] for i in template.differentiable_inputs]
        outputs = [template.inside.outputs[i][1] for i in template.differentiable_outputs]
        begin = self._marker(())
        with named_apart(graph), host.apart() as notes:
            twins = [None if like is None else host.recorder.stand_in_placeholder(like) for like in likes]
            pairs = [(output, twin) for output, twin in zip(outputs, twins, strict=True) if twin is not None]
            roots = [(gradient_key(output), node) for output, (node, _) in pairs]
            host.arrived.update(key for key, _ in roots if key is not None)
            run_part_of_backward(
                [output for output, _ in pairs],
                inputs,
                [twin for _, (_, twin) in pairs],
                self._host,
                since=template.moment,
            )
            gradients = follow(notes, roots, 0)
            names = NameCounts.now(graph)
        arrivals, read = self._arrivals(template, gradients)
        return Rehearsal(
            tangents=tuple(None if twin is None else twin[0] for twin in twins),
            notes=notes,
            gradients=gradients,
            arrivals=arrivals,
            begin=begin,
            border=self._marker(tuple(read)),
            names=names.since(NameCounts({})),
        )

    def forget(self) -> None:
        """Let go of all tensors of the run."""
        self.kinds = {kind: replace(known, templates=[]) for kind, known in self.kinds.items()}
        self.release()
        self.applications, self.templates = [], []

    def release(self) -> None:
        """Let go of what would hold itself: results lead to autograd's nodes, and those to their calls."""
        for application in self.applications:
            application.watched = ()

    def rehearsals(self) -> Iterator[Rehearsal]:
        """Every backward that was rehearsed."""
        return (rehearsal for template in self.templates for rehearsal in template.rehearsals.values())

    def check(self) -> None:
        """Raise `Doubt` where a record was used for what it does not stand for."""
        for application in self.applications:
            if any(writes_to(tensor) != version for tensor, version in application.watched):
                raise Doubt(
                    type(application.template.conditions.module),
                    "an argument or result of it is written in place afterwards",
                )

    def _arrivals(
        self, template: Template, gradients: Gradients
    ) -> tuple[dict[int, tuple[Arriving, ...]], list[fx.Node]]:
        """The gradients that reached each input, and the nodes that hold them."""
        read: list[fx.Node] = []
        found: dict[int, tuple[Arriving, ...]] = {}
        for position in template.differentiable_inputs:
            key = gradient_key(template.inside.inputs[position][1])
            arrivals = []
            for arrival in gradients.arrivals.get(key, []) if key else []:
                total = arrival.sum or arrival.node
                arrivals.append(
                    Arriving(
                        value=len(read),
                        sum=None if arrival.sum is None else len(read) + 1,
                        scopes=arrival.scopes,
                        at=arrival.at,
                        like=arrival.node.meta["val"],
                        total=total.meta["val"],
                    )
                )
                read += [arrival.node] if arrival.sum is None else [arrival.node, arrival.sum]
            found[position] = tuple(arrivals)
        return found, read


def _ignore(_result: Any) -> None:
    """The result of a call that nobody watches."""


def _grown(before: Counts, now: Counts) -> dict[Any, int]:
    """How often each function was called since then."""
    return {function: more for function, count in now.items() if (more := count - before.get(function, 0))}


def _add(counts: dict[Any, int], more: Counts) -> None:
    for function, count in more.items():
        counts[function] = counts.get(function, 0) + count


def _result(template: Template, found: Likeness, results: Sequence[Tensor]) -> Any:
    """What the recorded call returned, over the values of this one."""
    outputs = {node: result for (node, _), result in zip(template.inside.outputs, results, strict=True)}
    leaves = [
        outputs[node] if node in outputs else found.tensors.get(id(leaf), leaf)
        for leaf, node in zip(template.outcome.leaves, template.outcome.nodes, strict=True)
    ]
    return tree_unflatten(leaves, template.outcome.spec)


def repeated_read(read: Read, look: Look, found: Likeness, before: ModulePath, now: ModulePath) -> Read:
    """The read that a call inside the module `now` would have made, like `read` in the module `before`."""
    holder = found.thing(read.holder)
    value = read.value
    if look.table is not None and look.table != COMPUTED and read.is_there:
        value = held(holder, read.name, look.table)
    elif isinstance(value, MethodType):
        value = MethodType(value.__func__, found.thing(value.__self__))
    module = read.module
    if module is not None and module.is_within(before):
        module = ModulePath((*now, *module.relative_to(before)))
    return Read(holder, read.name, value, read.is_there, module, read.source)
