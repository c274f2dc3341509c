"""Modes of torch that a model asked for: its program is what the model does where they are so."""

from collections.abc import Sequence
from dataclasses import dataclass

from whence._torch.autograd.mode_questions import mode_now
from whence.errors import CallError, Place
from whence.provenance import Source


@dataclass(frozen=True)
class AskedMode:
    """A mode that the model asked for: how it was, and the call and the line that asked."""

    name: str
    value: bool
    call: str
    source: Source | None

    @property
    def holds(self) -> bool:
        """Whether the mode is now as it was."""
        return mode_now(self.name) == self.value


def refuse_other_modes(asked: Sequence[AskedMode]) -> None:
    """Raise `CallError` where a mode is not as it was."""
    for mode in asked:
        if not mode.holds:
            raise _other_mode(mode)


def _other_mode(asked: AskedMode) -> CallError:
    was, now = ("on", "off") if asked.value else ("off", "on")
    return CallError(
        f"{asked.name} was {was} at capture, and is {now}",
        where=Place(asked.call, None if asked.source is None else str(asked.source)),
        why="the model asks for it there, and what it computes then is part of the captured graph",
        remedy="call it in the mode of the capture; capture again in this mode; or call "
        'program.guarded(model, on_violation="recapture"), which does so where a mode has changed',
    )
