"""Branches that values decide, taken as the example takes them, where that is asked for.

A model is captured without, if it can be. Otherwise numbers and sizes of a run are symbols, and only what is
asked of them is decided. Where code cannot work with a symbol (the key of a dict), each of these is what it
is in the example.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from whence.dependence.asking import Failed, attempt, dismiss
from whence.errors import CaptureError, DataDependent, SideEffect, WhenceError
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
            dismiss(error)
            return found
        last = found.error
    try:
        if given.dynamic_shapes is None and not isinstance(last, DataDependent):
            raise last  # every value was known
        raise further(error, last) from error.__cause__
    finally:
        del error, last, found  # or what is raised would hold this frame, which holds it


def with_open_numbers(given: Given, capture: Callable[[Given], Result]) -> Result:
    """What `capture` gives; raises `DataDependent` where a symbol does not help either.

    A capture without open sizes is quicker, and most models read no number from a tensor. So one is tried
    first. Where the model needs such a number it is captured once more, with symbols for those.
    """
    if given.dynamic_shapes is not None:
        return capture(given)
    try:
        return capture(given)
    except DataDependent as needed:
        found = attempt(lambda: capture(replace(given, dynamic_shapes={})))
        if not isinstance(found, Failed):
            dismiss(needed)
            return found
        try:
            raise further(needed, found.error) from needed.__cause__
        finally:
            del found  # or what is raised would hold this frame, which holds it


def further(needed: WhenceError, then: Exception) -> Exception:
    """Of two errors the one that says what is in the way: the second, where the first line was got over, and
    where only a first step does it, after which the step can be captured."""
    is_elsewhere = isinstance(then, DataDependent) and then.where.line not in (None, needed.where.line)
    is_over = isinstance(then, CaptureError) and then.of_first_step
    return then if is_elsewhere or is_over else needed
