"""Run code of the user for its answer, whatever it does."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any, TypeVar

from whence.dependence.lookup import NOTHING

Result = TypeVar("Result")


@dataclass(frozen=True)
class Failed:
    """What the object's own code raised."""

    error: Exception

    def __str__(self) -> str:
        return f"an error ({type(self.error).__name__}: {self.error})"


def ask(thing: object, name: str) -> Any:
    """The attribute; `NOTHING` where there is none, `Failed` where looking for it fails."""
    return attempt(lambda: getattr(thing, name, NOTHING))


def attempt(work: Callable[[], Result]) -> Result | Failed:
    """What `work` returns, or `Failed`.

    This is the one place where every exception is caught: an error is an answer here.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        return Failed(error)


def tried(work: Callable[[], Result]) -> Result | Failed:
    """As `attempt`, where nobody will see what is raised."""
    found = attempt(work)
    if isinstance(found, Failed):
        dismiss(found.error)
    return found


def dismiss(error: BaseException | None) -> None:
    """Nobody will see an error: its frames go, which would hold all that was there until Python's collector
    looks for circles. So do those of errors that led to it, but not of one that a caller is handling."""
    if error is not None:
        error.__traceback__ = None
        before = error.__cause__ or error.__context__
        dismiss(None if before is None or _is_handled(before) else before)


def _is_handled(error: BaseException) -> bool:
    """Whether a function that runs now has caught it."""
    caught = error.__traceback__
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    return caught is None or any(frame is caught.tb_frame for frame in frames)
