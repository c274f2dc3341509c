"""Ask an object of the user for an attribute, whatever its code does."""

from dataclasses import dataclass
from typing import Any

from whence.guards.lookup import NOTHING


@dataclass(frozen=True)
class Failed:
    """What the object's own code raised."""

    error: Exception

    def __str__(self) -> str:
        return f"an error ({type(self.error).__name__}: {self.error})"


def ask(thing: object, name: str) -> Any:
    """The attribute; `NOTHING` where there is none, `Failed` where looking for it fails.

    This is the one place where every exception is caught: a check reports what it finds, an error too.
    """
    try:
        return getattr(thing, name, NOTHING)
    except Exception as error:  # noqa: BLE001
        return Failed(error)
