"""What a saved program keeps in words, for no file holds it: functions, objects of the user's classes."""

from dataclasses import dataclass
from typing import Any, NoReturn

from whence.errors import CallError


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
