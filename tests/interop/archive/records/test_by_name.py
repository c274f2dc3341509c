"""Things by their names: those inside of others, too."""

import functools
from collections.abc import Callable
from typing import Any

from whence.interop.archive.records.by_name import looked_up, name_of


def twice(function: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(function)
    def run() -> int:
        return function() * 2

    return run


@twice
@twice
def number() -> int:
    return 1


class Methods:
    @staticmethod
    @twice
    def static() -> int:
        return 2


def test_functions_inside_of_decorators() -> None:
    """The innermost one has a name, whatever stands around it; those between have none."""
    outer: Any = number
    inner = outer.__wrapped__.__wrapped__
    name = name_of(inner)
    assert name is not None
    assert looked_up(name) is inner
    assert looked_up(str(name_of(number))) is number
    assert looked_up(str(name_of(Methods.static))) is Methods.static
    assert name_of(outer.__wrapped__) is None
    assert name_of(twice(lambda: 1)) is None
