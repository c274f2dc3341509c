"""Watch calls that run: afterwards each is a template, or there is a reason why not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from whence._torch.function_tracer import FunctionTracer
from whence._torch.pytrees import tree_flatten
from whence._torch.tensors import without_functions
from whence.dependence.variables import OutsideVariables, Variables
from whence.tracing.listening.recording import Recording
from whence.tracing.replay.eligibility import attempted
from whence.tracing.replay.records.records import Records
from whence.tracing.replay.records.template import Template
from whence.tracing.replay.records.watched_call import (
    Outcome,
    ReadsSeen,
    Start,
    Unfit,
    WatchedCall,
    attributes_below,
)
from whence.tracing.replay.replayer import Watched

Learn = Callable[[nn.Module, Template | Unfit], None]


@dataclass(frozen=True)
class Trials:
    """The calls that are being watched; `learn` is told what came of each, and `joint` says whether the
    capture records the backward, too."""

    recording: Recording
    records: Records
    functions: FunctionTracer
    learn: Learn
    joint: bool
    open: list[WatchedCall] = field(default_factory=list)

    @contextmanager
    def watched(self, module: nn.Module, scope: int, wish: Watched) -> Iterator[Callable[[Any], None]]:
        """Watch a call; what it returns is to be told."""
        recording, results = self.recording, list[Any]()
        with without_functions():
            trial = self._begun(module, scope, wish)
        self.open.append(trial)
        try:
            with (
                recording.run.objections.told_to(trial.seen.faults),
                recording.run.reads.watched(trial.seen.read),
                self.functions.seen_by(trial.variables.met),
            ):
                yield results.append
        finally:
            self.open.pop()
        with without_functions():
            self.learn(module, self._found(trial, results[0]))

    def rely_on(self, outside: OutsideVariables) -> None:
        """What is being watched relies on these, too: a call inside it was replayed."""
        for trial in self.open:
            trial.variables.include(outside)

    def _begun(self, module: nn.Module, scope: int, wish: Watched) -> WatchedCall:
        run, given = self.recording.run, wish.given
        variables = Variables(run.places.finder.is_user, run.reads.is_watched)
        trial = WatchedCall(
            module=module,
            scope=scope,
            given=given,
            nodes=tuple(map(self._node_of, given.leaves)),
            modes=wish.modes,
            seen=ReadsSeen(variables),
            variables=variables,
            caller=run.places.line(),
            attributes=attributes_below(module),
            start=Start.now(self.recording, self.records.markers.put()),
        )
        for inner, _ in trial.attributes:
            variables.reached.add(type(inner), type(inner).__name__)
        for leaf in given.leaves:
            if isinstance(leaf, Tensor):
                trial.seen.meet_tensor(leaf)
        return trial

    def _found(self, trial: WatchedCall, result: Any) -> Template | Unfit:
        try:
            template = self._template(trial, result)
        except Unfit as unfit:
            return unfit
        self.records.templates.append(template)
        return template

    def _node_of(self, leaf: object) -> fx.Node | None:
        return self.recording.recorder.node_of(leaf) if isinstance(leaf, Tensor) else None

    def _template(self, trial: WatchedCall, result: Any) -> Template:
        leaves, spec = tree_flatten(result)
        outcome = Outcome(result, spec, tuple(leaves), tuple(map(self._node_of, leaves)))
        recording, start = self.recording, trial.start
        conditions, border = attempted(trial, outcome, recording, differentiates=self.joint)
        log, inside = recording.log, recording.log.order[start.position :]
        return Template(
            conditions=conditions,
            inside=border,
            outcome=outcome,
            start=start,
            border=self.records.markers.put(*(node for node, _ in (*border.inputs, *border.outputs))),
            scopes=range(trial.scope, len(log.scopes)),
            names=start.names_since(recording.recorder.graph),
            functions=start.functions_since(recording.recorder.calls_of_functions()),
            keys={node: log.keys[node] for node in inside if node in log.keys},
            noted=frozenset(i for i, (node, _) in enumerate(border.inputs) if node in log.keys),
            recorded=tuple(inside),
            asked=slice(start.asked, len(log.asked)),
            contiguous=slice(start.contiguous, len(log.contiguous)),
            caller=trial.caller,
            reads=tuple(read for read, _ in trial.seen.reads.values()),
        )
