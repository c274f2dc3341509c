"""Programs for sizes that a branch excludes, beside the one that excludes them: which is it, for a call?"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from whence.program.program import FlatProgram

P = TypeVar("P", bound="FlatProgram")


def fitting(program: P, args: Any, kwargs: Any) -> P:
    """The program, or that variant of it which alone admits these arguments."""
    if not program.variants or not isinstance(args, tuple) or not isinstance(kwargs, Mapping | None):
        return program
    every: Sequence[P] = (program, *program.variants)  # type: ignore[arg-type]
    return next((each for each in every if not each.convention.faults(args, dict(kwargs or {}))), program)


def alone(program: P) -> P:
    """The program without its variants."""
    return program.with_changes(variants=()) if program.variants else program


def with_variants(program: P, change: Callable[[P], P]) -> P:
    """What a change makes of a program, and of each of its variants."""
    if not program.variants:
        return change(program)
    return change(alone(program)).with_changes(variants=tuple(map(change, program.variants)))  # type: ignore[arg-type]


def in_words(numbers: Iterable[tuple[str, int]]) -> str:
    """The sizes that are numbers in a variant: `batch is 1`."""
    return " and ".join(f"{name} is {size}" for name, size in numbers)
