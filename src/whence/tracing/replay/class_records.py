"""What is known of the modules of each class, and whether watching them still pays."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from whence._torch.subclasses.fully_sharded import class_as_written
from whence.program.replay import ClassReplay, Replays
from whence.tracing.replay.records.template import Template
from whence.tracing.replay.records.watched_call import SMALL

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
