"""Branches that values decide, taken as the example takes them, where that is asked for.

A model is captured without, if it can be. Otherwise numbers and sizes of a run are symbols, and only what is
asked of them is decided. Where code cannot work with a symbol (the key of a dict), each of these is what it
is in the example.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from whence.dependence.asking import Failed, attempt
from whence.errors import DataDependent, SideEffect
from whence.tracing.open_numbers import further
from whence.tracing.target.example import Given

Result = TypeVar("Result")
DECIDES = "values of the example decide in the model, and each call decides by its own"
"""Why calls are not replayed."""


def with_decisions(given: Given, capture: Callable[[Given], Result]) -> Result:
    """What `capture` gives; with decisions only where the model needs some."""
    undecided = replace(given, decide=None)
    if given.decide is None or given.numbers:
        return capture(undecided)
    try:
        return capture(undecided)
    except (DataDependent, SideEffect) as needed:  # where numbers are drawn outside of torch
        error = needed
    ways = [replace(given, dynamic_shapes={})] if given.dynamic_shapes is None else []
    for way in (*ways, given):
        found = attempt(lambda way=way: capture(way))  # type: ignore[misc]
        if not isinstance(found, Failed):
            return found  # type: ignore[no-any-return]
        last = found.error
    if given.dynamic_shapes is None and not isinstance(last, DataDependent):
        raise last  # every value was known
    raise further(error, last) from error.__cause__
