"""Decide, call by call, whether a module has to run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from whence._torch.autograd.nodes import inside_backward, inside_custom_function
from whence._torch.autograd.saved_tensors import packs_what_is_saved
from whence._torch.autograd.switches import modes_now
from whence._torch.observe.module_calls import ObservedCall
from whence._torch.pytrees import tree_flatten
from whence._torch.record.annotations import annotations
from whence._torch.sizes.symbols import known_about
from whence._torch.tensors import autocast_state, without_functions
from whence.dependence.variables import Functions, Variables
from whence.program.replay import Replays
from whence.schema import Phase
from whence.tracing.listening.recording import Recording
from whence.tracing.replay.apply import applied, differentiated, slots_of
from whence.tracing.replay.class_records import ClassRecord, Kinds
from whence.tracing.replay.differentiating import Calls
from whence.tracing.replay.eligibility import attempted
from whence.tracing.replay.likeness import Different, Likeness, likeness
from whence.tracing.replay.objections import Doubt
from whence.tracing.replay.records.markers import Markers
from whence.tracing.replay.records.rehearsal import rehearsal_for
from whence.tracing.replay.records.template import Application, Rehearsal, Template
from whence.tracing.replay.records.watched_call import (
    CallArguments,
    Outcome,
    ReadsSeen,
    Start,
    Unfit,
    WatchedCall,
    attributes_below,
)
from whence.tracing.replay.reuse import Reuse


class Replayer:
    """Watches the first call of what may be called again alike, and answers for those that are."""

    def __init__(self, recording: Recording, reuse: Reuse, functions: Functions) -> None:
        self._recording = recording
        self._reuse = reuse
        self._objections = recording.run.objections
        self.kinds = Kinds.of(module for _, module in recording.run.subject.named_modules())
        self.markers = Markers(recording.recorder)
        self.applications: list[Application] = []
        self.templates: list[Template] = []
        self._trials: list[WatchedCall] = []
        self._functions = functions

    @contextmanager
    def call(
        self, module: nn.Module, scope: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[ObservedCall]:
        """A call of a module: with its answer if it is like one that was recorded, else watched if that may
        pay."""
        kind = self.kinds.at(type(module))
        kind.calls += 1
        if not self._reuse.wanted or kind.is_single:
            yield ObservedCall(_ignore)
        elif objection := kind.closed or self._objection(type(module)):
            kind.refuse(objection)
            yield ObservedCall(_ignore)
        else:
            leaves, spec = tree_flatten((args, kwargs))
            given = CallArguments(spec, tuple(leaves), args, kwargs)
            with without_functions():
                modes = modes_now()
                answer = self._answer(kind, module, scope, given, modes)
            if answer is not None or kind.closed:
                yield ObservedCall(_ignore, answer)
            else:
                yield from self._watched(kind, module, scope, given, modes)

    def _objection(self, kind: type) -> str:
        """Why a call has to run where it is; empty if it need not."""
        for refused in (None, kind):
            if refused in self._reuse.without:
                return self._reuse.without[refused]
        if packs_what_is_saved():
            return "a checkpoint, or another hook, sees what autograd saves"
        if autocast_state() and torch.is_autocast_cache_enabled():
            return "autocast keeps weights that it has cast from one call to the next"
        if not self._reuse.joint and self._recording.run.grad_modes.modes:
            return "it is called where the model has set the grad mode"
        if annotations():
            return "it is called where `torch.fx.traceback.annotate` says something of its operations"
        if inside_backward():
            return "it is called in a backward pass"
        return "a custom autograd function calls it" if inside_custom_function() else ""

    # --- watching ------------------------------------------------------------------------------------

    def _watched(
        self, kind: ClassRecord, module: nn.Module, scope: int, given: CallArguments, modes: tuple[Any, ...]
    ) -> Iterator[ObservedCall]:
        """Watch a call that runs; afterwards it is a template, or there is a reason why not."""
        recording, results = self._recording, list[Any]()
        variables = Variables(recording.run.places.finder.is_user, recording.run.reads.is_watched)
        with without_functions():
            trial = WatchedCall(
                module=module,
                scope=scope,
                given=given,
                nodes=tuple(map(self._node_of, given.leaves)),
                modes=modes,
                seen=ReadsSeen(variables),
                variables=variables,
                caller=recording.run.places.line(),
                attributes=attributes_below(module),
                start=Start.now(recording, self.markers.put()),
            )
            for inner, _ in trial.attributes:
                variables.reached.add(type(inner), type(inner).__name__)
            for leaf in given.leaves:
                if isinstance(leaf, Tensor):
                    trial.seen.meet_tensor(leaf)
        self._trials.append(trial)
        try:
            with (
                self._objections.told_to(trial.seen.faults),
                recording.run.reads.watched(trial.seen.read),
                self._functions.seen_by(trial.variables.met),
            ):
                yield ObservedCall(results.append)
        finally:
            self._trials.remove(trial)
        with without_functions(), self._functions.untold():
            try:
                template = self._template(trial, results[0])
            except Unfit as unfit:
                kind.unfit(str(unfit))
            else:
                kind.learn(template)
                self.templates.append(template)

    def _node_of(self, leaf: object) -> fx.Node | None:
        return self._recording.recorder.node_of(leaf) if isinstance(leaf, Tensor) else None

    def _template(self, trial: WatchedCall, result: Any) -> Template:
        leaves, spec = tree_flatten(result)
        outcome = Outcome(result, spec, tuple(leaves), tuple(map(self._node_of, leaves)))
        recording, start = self._recording, trial.start
        conditions, border = attempted(trial, outcome, recording, differentiates=self._reuse.joint)
        inside = recording.log.order[start.position :]
        return Template(
            conditions=conditions,
            inside=border,
            outcome=outcome,
            start=start,
            border=self.markers.put(*(node for node, _ in (*border.inputs, *border.outputs))),
            scopes=range(trial.scope, len(recording.log.scopes)),
            names=start.names_since(recording.recorder.graph),
            functions=start.functions_since(recording.recorder.calls_of_functions()),
            keys={node: recording.log.keys[node] for node in inside if node in recording.log.keys},
            noted=frozenset(i for i, (node, _) in enumerate(border.inputs) if node in recording.log.keys),
            recorded=tuple(inside),
            layouts=range(start.layouts, len(recording.log.layouts_read)),
            caller=trial.caller,
            reads=tuple(read for read, _ in trial.seen.reads.values()),
        )

    # --- replaying -----------------------------------------------------------------------------------

    def _answer(
        self, kind: ClassRecord, module: nn.Module, scope: int, given: CallArguments, modes: tuple[Any, ...]
    ) -> tuple[Any] | None:
        """The result of a call that is like a recorded one."""
        difference = ""
        for template in reversed(kind.templates):
            if known_about(self._recording.recorder.environment) != template.start.sizes_known:
                difference = "something has been found out about sizes since"
                continue
            try:
                found = likeness(template.conditions, module, given.spec, given.leaves, modes)
            except Different as different:
                difference = difference or str(different)
            else:
                kind.use()
                return (self._replayed(template, found, scope),)
        if difference:
            kind.refuse(difference)
        return None

    def _replayed(self, template: Template, found: Likeness, scope: int) -> Any:
        application, result = applied(
            self._recording, template, found, scope, self._slots(template), self._gradients
        )
        for inner in template.scopes[1:]:
            module = self._recording.log.scopes[inner].module
            known = self.kinds.at(type(module))
            known.calls, known.replayed = known.calls + 1, known.replayed + 1
        for trial in self._trials:
            trial.variables.include(template.conditions.outside)
        self.applications.append(application)
        return result

    def _slots(self, template: Template) -> list[tuple[int, int]]:
        """The gradients that a call will be asked for."""
        if not torch.is_grad_enabled() or not template.differentiable_outputs:
            return []
        if not self._reuse.joint:
            return [(position, 0) for position in template.differentiable_inputs]
        likes = [template.inside.outputs[i][1] for i in template.differentiable_outputs]
        return slots_of(template, self._rehearsal(template, likes))

    def _rehearsal(self, template: Template, tangents: Sequence[Tensor | None]) -> Rehearsal:
        return rehearsal_for(self._recording, self.markers, template, tangents)

    def _gradients(
        self, application: Application, tangents: Sequence[Tensor | None]
    ) -> tuple[Sequence[Tensor | None], Calls]:
        """The gradients of a replayed call, and the calls that each comes from."""
        template = application.template
        is_over = any(each.log is self._recording.log for each in application.backwards)
        if self._recording.run.running.phase is not Phase.BACKWARD or torch.is_grad_enabled() or is_over:
            raise self._doubt(template.kind, "the model differentiates through it")
        with without_functions():
            given = [tangents[i] for i in template.differentiable_outputs]
            rehearsal = self._rehearsal(template, given)
            defined = [tangent for tangent in given if tangent is not None]
            return differentiated(self._recording, application, rehearsal, defined)

    # --- afterwards ----------------------------------------------------------------------------------

    def _doubt(self, kind: type, why: str) -> Doubt:
        return self._objections.remembered(Doubt(kind, why))

    def report(self) -> Replays:
        """What was replayed, as plain data."""
        return self.kinds.report() if self._reuse.wanted else Replays()

    def rehearsals(self) -> Iterator[Rehearsal]:
        """Every backward that was rehearsed."""
        return (rehearsal for template in self.templates for rehearsal in template.rehearsals.values())

    def check(self, returned: Sequence[fx.Node | None]) -> None:
        """Raise `Doubt` where a record was used for what it does not stand for.

        `returned` are the results of the run.
        """
        self._objections.look_for_writes()
        self._objections.check()
        for template in self._used():
            if any(self._escapes(node, template, returned) for node in template.recorded):
                raise Doubt(template.kind, "something inside it is used outside")

    def _used(self) -> list[Template]:
        """The templates that stood for a call."""
        return list({id(a.template): a.template for a in self.applications}.values())

    def _escapes(self, node: fx.Node, template: Template, returned: Sequence[fx.Node | None]) -> bool:
        """Whether a value inside a recorded call, which it does not return, is used outside in the
        forward."""
        if node in template.given_out:
            return False
        marks = self._recording.log.marks
        users = (user for user in node.users if user not in template.nodes and user in marks)
        return node in returned or any(marks[user].phase is not Phase.BACKWARD for user in users)

    def inside_templates(self) -> dict[fx.Node, type]:
        """What was computed inside recorded calls that stood for others, with the class of each."""
        return {node: template.kind for template in self._used() for node in template.recorded}

    def forget(self) -> None:
        """Let go of all tensors of the run."""
        for application in self.applications:
            application.backwards.clear()  # their logs lead to autograd's nodes, too
        for template in self.templates:
            template.rehearsals.clear()
        for kind in self.kinds.values():
            kind.templates = []
        self.applications, self.templates = [], []


def _ignore(_result: Any) -> None:
    """The result of a call that nobody watches."""
