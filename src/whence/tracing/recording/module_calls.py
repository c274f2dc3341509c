"""Hears which modules are called, and where checkpoints begin."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from whence._torch.observe.module_calls import ObservedCall
from whence.program import Structure
from whence.provenance import CallSite
from whence.schema import Phase
from whence.tracing.listening.branches import Branches
from whence.tracing.listening.run_state import RunState
from whence.tracing.listening.tensors import RunTensors
from whence.tracing.log.events import Gave, Opened, Took
from whence.tracing.replay.records.watched_call import CallArguments
from whence.tracing.replay.replay import Replay
from whence.tracing.replay.replayer import Alike, Watched
from whence.tracing.target.subject import Signatures


@dataclass(frozen=True)
class ModuleCalls:
    """Opens a scope for every call of a module that has a name, and lets it be replayed where it may."""

    run: RunState
    tensors: RunTensors
    branches: Branches
    replay: Replay
    watching_functions: Callable[[], AbstractContextManager[Any]]
    signatures: Signatures = field(default_factory=Signatures)

    @contextmanager
    def called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[ObservedCall]:
        """A module call: a new scope in the forward pass, the old one again where a checkpoint recomputes."""
        self.run.interrupts.let_in()
        with self.run.watch.calling(module), self._call(module, args, kwargs) as call:
            yield call

    @contextmanager
    def _call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[ObservedCall]:
        names, running = self.run.names, self.run.running
        path = None if self.branches.retraces else names.path(module)
        if path is None:
            yield ObservedCall(_ignore)
        elif running.phase is Phase.BACKWARD:
            with running.inside(running.repeated(path)):
                yield ObservedCall(_ignore)
        else:
            is_reached = names.is_reached(module)
            with names.calling(module, path) as site:
                if self.branches.are_recorded:
                    with running.inside(running.opened(Opened.now(site, running.scope))):
                        yield ObservedCall(_ignore)
                    return
                leaves, inputs = self.tensors.flattened((args, kwargs))
                scope = self._begin(module, site, inputs, is_reached=is_reached)
                with running.inside(scope):
                    given = CallArguments(inputs.spec, leaves, args, kwargs)
                    decision = self.replay.replayer.decision(module, given)
                    yield from self._decided(decision, module, scope)

    def _decided(
        self, decision: Watched | Alike | None, module: nn.Module, scope: int
    ) -> Iterator[ObservedCall]:
        """A call that runs, is watched meanwhile, or need not run."""
        gave = partial(self._gave, scope)
        if isinstance(decision, Alike):
            answer = self.replay.stand_ins.put(decision, scope)
            self.replay.trials.rely_on(decision.template.conditions.outside)
            gave(answer)
            yield ObservedCall(_ignore, (answer,))
        elif isinstance(decision, Watched):
            with self.replay.trials.watched(module, scope, decision) as returned:
                yield ObservedCall(partial(_telling_all, (gave, returned)))
        else:
            yield ObservedCall(gave)

    def accessed(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        """A module with several names is known by the one it was last reached through."""
        self.run.names.reached(parent, name, child)

    def _begin(self, module: nn.Module, site: CallSite, inputs: Structure, *, is_reached: bool) -> int:
        running = self.run.running
        parameters = self.signatures.of(module)
        scope = running.opened(Opened.now(site, running.scope, module, parameters, is_reached=is_reached))
        running.log.add(Took(scope, inputs))
        return scope

    def _gave(self, scope: int, result: Any) -> None:
        self.run.log.add(Gave(scope, self.tensors.structure(result)))

    def checkpoint_starts(self, rewinds: bool) -> Callable[[], AbstractContextManager[None]]:
        """A checkpointed region begins here: it is computed again in this call, with those that follow."""
        self.run.objections.unfit("a checkpoint runs inside it")
        self.run.random_states.checkpointed(rewinds=rewinds)
        return partial(self._recomputing, self.run.running.here(), rewinds)

    @contextmanager
    def _recomputing(self, since: tuple[int, int, int], rewinds: bool) -> Iterator[None]:
        with self.run.running.again(since, rewinds), self.watching_functions():
            yield


def _telling_all(listeners: Sequence[Callable[[Any], None]], result: Any) -> None:
    """Tell several of what a call returned, in order."""
    for listener in listeners:
        listener(result)


def _ignore(_result: Any) -> None:
    """The call of a module that has no name in the model: its operations belong to the caller."""
