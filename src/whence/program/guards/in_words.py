"""What a saved program keeps in words, for no file holds it: functions, objects of the user's classes."""

from dataclasses import dataclass
from typing import Any, NoReturn

from whence.errors import CallError


class NamedOnly:
    """Base of the classes that stand for those of a model, in a program that was loaded without one."""


@dataclass(frozen=True, slots=True)
class OfClass:
    """Stands for an object of a class, of which a file keeps nothing else."""

    kind: type

    def __repr__(self) -> str:
        return f"a {self.kind.__name__}"


@dataclass(frozen=True, slots=True)
class InWords:
    """Stands for a value that a file does not hold; it is equal to no value of a model."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """A function that was kept in words cannot run; raises `CallError`."""
        raise CallError(
            f"{self.text} cannot run: the program was loaded from a file, which keeps of it only its name",
            remedy="give the program the function: program.under(loss_function=...), "
            "or whence.capture the model again",
        )
