"""Numbers and sizes that data decide are open wherever a model has some, and only there.

A capture without open sizes is quicker, and most models read no number from a tensor. So one is tried first.
Where the model needs such a number it is captured once more, with symbols for those, and fixed sizes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from whence.dependence.asking import Failed, attempt
from whence.errors import DataDependent, WhenceError
from whence.tracing.target.example import Given

Result = TypeVar("Result")


def with_open_numbers(given: Given, capture: Callable[[Given], Result]) -> Result:
    """What `capture` gives; raises `DataDependent` where a symbol does not help either."""
    if given.dynamic_shapes is not None:
        return capture(given)
    try:
        return capture(given)
    except DataDependent as needed:
        found = attempt(lambda: capture(replace(given, dynamic_shapes={})))
        if not isinstance(found, Failed):
            return found  # type: ignore[no-any-return]
        raise further(needed, found.error) from needed.__cause__


def further(needed: WhenceError, then: Exception) -> Exception:
    """Of two errors the one that says what is in the way: the second, where the first line was got over."""
    is_elsewhere = isinstance(then, DataDependent) and then.where.line not in (None, needed.where.line)
    return then if is_elsewhere else needed
