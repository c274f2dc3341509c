"""What may become of a call of a module."""

from dataclasses import dataclass
from typing import Any

from whence.tracing.replay.likeness import Likeness
from whence.tracing.replay.records.template import Template
from whence.tracing.replay.records.watched_call import CallArguments


@dataclass(frozen=True)
class Runs:
    """It runs, and nobody watches."""


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


Decision = Runs | Watched | Alike
