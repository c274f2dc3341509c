"""Variants: what a model computes at single sizes that a branch excludes, each a program of its own."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from whence.dependence.asking import Failed, attempt
from whence.errors import Fault, WhenceError
from whence.program import Program
from whence.program.arguments.open_sizes import in_words
from whence.tracing.excluded_sizes import excluded_sizes
from whence.tracing.target.example import Numbers

P = TypeVar("P", bound=Program)
_MOST = 16
"""A model that branches by more sizes than this is left with its rules, and a warning says so."""


def variant_faults(variants: object, dynamic_shapes: object, strict: bool) -> list[Fault]:
    """Why there can be no variants, where some are asked for."""
    if not isinstance(variants, bool):
        return [Fault(f"variants cannot be {variants!r}", remedy="use True or False")]
    found: list[Fault] = []
    if variants and dynamic_shapes is None:
        why = "a variant is for a size that may vary and that one branch excludes, and all sizes are fixed"
        found.append(Fault("variants=True needs dynamic_shapes", why=why, remedy="say which sizes may vary"))
    if variants and strict:
        why = "PyTorch's bytecode front end is not asked for the other side of a branch"
        found.append(Fault("variants does not work with strict=True", why=why, remedy="use strict=False"))
    return found


@dataclass(frozen=True)
class _Excluded:
    """Sizes for which a program is missing: by name, and as they were found in one capture after another."""

    sizes: tuple[tuple[str, int], ...]
    numbers: tuple[Numbers, ...]

    def __str__(self) -> str:
        return in_words(self.sizes)


def with_variants_at(program: P, again: Callable[[tuple[Numbers, ...]], P]) -> P:
    """The program, with what `again` captures at each size that a branch excludes, and at several of them.

    A size for which the model itself has an error stays excluded; where it cannot be captured there, a
    warning says why.
    """
    found: dict[frozenset[tuple[str, int]], P] = {}
    waiting = [*_missing(program, _Excluded((), ()))]
    for at in waiting:  # which grows
        if frozenset(at.sizes) in found:
            continue
        if len(found) == _MOST:
            warnings.warn(f"there are more than {_MOST} variants: where {at} there is none", stacklevel=4)
            break
        other = _captured(at, again)
        if other is not None:
            found[frozenset(at.sizes)] = other
            waiting += _missing(other, at)
    return program.with_changes(variants=tuple(found.values()))


def _missing(program: Program, known: _Excluded) -> Iterator[_Excluded]:
    """The sizes that a program excludes, beside those that are numbers in it."""
    sizes = program.convention.sizes
    if sizes is None:
        return
    for at in excluded_sizes(sizes):
        yield _Excluded(tuple(sorted([*known.sizes, *at.items()])), (*known.numbers, (sizes, at)))


def _captured(at: _Excluded, again: Callable[[tuple[Numbers, ...]], P]) -> P | None:
    with warnings.catch_warnings(action="ignore"):  # they were given already
        other: Any = attempt(lambda: again(at.numbers))
    if not isinstance(other, Failed):
        return other.under(numbers=at.sizes)  # type: ignore[no-any-return]
    if isinstance(other.error, WhenceError):  # not the model's own, which has no way for such a size
        first = str(other.error).partition("\n")[0]
        warnings.warn(f"there is no variant where {at}, which stays excluded: {first}", stacklevel=5)
    return None
