"""Decide, call by call, whether a module has to run, by what is known of the modules of its class."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from whence._torch.autograd.nodes import inside_backward, inside_custom_function
from whence._torch.autograd.saved_tensors import packs_what_is_saved
from whence._torch.autograd.switches import modes_now
from whence._torch.record.annotations import annotations
from whence._torch.sizes.symbols import shape_env_version
from whence._torch.subclasses.fully_sharded import class_as_written
from whence._torch.tensors import autocast_state, without_functions
from whence.program.replay import ClassReplay, Replays
from whence.tracing.listening.recording import Recording
from whence.tracing.replay.records.likeness import Different, Likeness, likeness
from whence.tracing.replay.records.template import Template
from whence.tracing.replay.records.watched_call import SMALL, CallArguments, Unfit
from whence.tracing.reuse import Reuse


@dataclass(frozen=True)
class Watched:
    """It runs and is watched: others may be like it. `modes` are what is switched on."""

    given: CallArguments
    modes: tuple[Any, ...]


@dataclass(frozen=True)
class Alike:
    """It need not run: it is like one that was recorded, and `found` says what is what."""

    template: Template
    found: Likeness


_TRIALS_WITHOUT_USE = 4
"""How many watched calls of a class may be of no use to others, before no more are watched."""


@dataclass
class ClassRecord:
    """What is known of the modules of one class.

    `templates` are recorded calls, newest last, and `unused` how many were made since one was last used.
    `reasons` are why calls were not replayed, each with their number; `closed` is the one for which no more
    will be tried.
    """

    instances: int = 0
    calls: int = 0
    replayed: int = 0
    unused: int = 0
    closed: str = ""
    templates: list[Template] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def is_single(self) -> bool:
        """Whether nothing suggests that there will be another call like the first."""
        return self.instances == 1 and self.calls == 1

    def refuse(self, reason: str) -> None:
        """A call has to run, for this reason."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def unfit(self, reason: str) -> None:
        """A watched call is of no use to others."""
        self.refuse(reason)
        if reason == SMALL or sum(self.reasons.values()) >= _TRIALS_WITHOUT_USE:
            self.closed = reason

    def learn(self, template: Template) -> None:
        """A watched call may stand for others."""
        self.templates.append(template)
        self.unused += 1
        if self.unused > _TRIALS_WITHOUT_USE:
            self.closed = "no two of its calls are alike"

    def use(self) -> None:
        """A call has been replayed."""
        self.replayed += 1
        self.unused = 0


class Kinds(dict[type, ClassRecord]):
    """All classes of modules, by class."""

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> "Kinds":
        """The classes of some modules, with the number of modules of each."""
        kinds = cls()
        for module in {id(module): module for module in modules}.values():
            kinds.at(type(module)).instances += 1
        return kinds

    def at(self, kind: type) -> ClassRecord:
        """What is known of a class."""
        known = self.get(kind)
        if known is None:
            known = self[kind] = ClassRecord()
        return known

    def report(self) -> Replays:
        """What was replayed, as plain data."""
        called = [(kind, known) for kind, known in self.items() if known.calls]
        return Replays(
            tuple(
                ClassReplay(
                    class_as_written(kind).__name__,
                    known.calls - known.replayed,
                    known.replayed,
                    tuple(known.reasons.items()),
                )
                for kind, known in called
            )
        )


class Replayer:
    """Says of each call whether it runs, and learns from those that were watched; it changes nothing else."""

    def __init__(self, recording: Recording, reuse: Reuse) -> None:
        self._recording = recording
        self._reuse = reuse
        self._kinds = Kinds.of(module for _, module in recording.run.subject.named_modules())

    def decision(self, module: nn.Module, given: CallArguments) -> Watched | Alike | None:
        """What becomes of a call of a module; None for one that runs, and that nobody watches."""
        kind = self._kinds.at(type(module))
        kind.calls += 1
        if not self._reuse.wanted or kind.is_single:
            return None
        if objection := kind.closed or self._objection(type(module)):
            kind.refuse(objection)
            return None
        with without_functions():
            modes = modes_now()
            return self._like(kind, module, given, modes) or Watched(given, modes)

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

    def _like(
        self, kind: ClassRecord, module: nn.Module, given: CallArguments, modes: tuple[Any, ...]
    ) -> Alike | None:
        """The newest recorded call that this one is like."""
        difference = ""
        for template in reversed(kind.templates):
            if shape_env_version(self._recording.recorder.environment) != template.start.sizes_known:
                difference = "something has been found out about sizes since"
                continue
            try:
                found = likeness(template.conditions, module, given.spec, given.leaves, modes)
            except Different as different:
                difference = difference or str(different)
            else:
                self._use(kind, template)
                return Alike(template, found)
        if difference:
            kind.refuse(difference)
        return None

    def _use(self, kind: ClassRecord, template: Template) -> None:
        """Count a call that is replayed, and those inside it."""
        kind.use()
        for inner in template.scopes[1:]:
            known = self._kinds.at(type(self._recording.log.scopes[inner].module))
            known.calls, known.replayed = known.calls + 1, known.replayed + 1

    def learn(self, module: nn.Module, found: Template | Unfit) -> None:
        """What came of a call that was watched."""
        kind = self._kinds.at(type(module))
        if isinstance(found, Unfit):
            kind.unfit(str(found))
        else:
            kind.learn(found)

    def report(self) -> Replays:
        """What was replayed, as plain data."""
        return self._kinds.report() if self._reuse.wanted else Replays()

    def forget(self) -> None:
        """Let go of all tensors of the run."""
        for kind in self._kinds.values():
            kind.templates.clear()
