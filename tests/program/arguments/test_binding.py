import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whence.program.arguments.binding import binding_faults


def plain(x: int, y: int, scale: int = 1) -> None: ...


def keyed(x: int, *, mask: int, scale: int = 1) -> None: ...


def positional(x: int, y: int = 0, /, z: int = 0) -> None: ...


def open_ended(x: int, *rest: int, mask: int, **options: int) -> None: ...


FUNCTIONS: tuple[Callable[..., None], ...] = (plain, keyed, positional, open_ended)
NAMES = ["x", "y", "z", "mask", "scale", "other"]


@settings(deadline=None, max_examples=300)
@given(
    function=st.sampled_from(FUNCTIONS),
    args=st.lists(st.just(0), max_size=4),
    kwargs=st.dictionaries(st.sampled_from(NAMES), st.just(0)),
)
def test_faults_are_found_where_python_finds_one(
    function: Callable[..., None], args: list[int], kwargs: dict[str, int]
) -> None:
    """There are faults exactly when Python does not bind the arguments."""
    parameters = inspect.signature(function)
    try:
        parameters.bind(*args, **kwargs)
    except TypeError:
        assert binding_faults(parameters, args, kwargs)
    else:
        assert binding_faults(parameters, args, kwargs) == []


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "faults"),
    [
        (plain, (), {}, ["missing a required argument: 'x'", "missing a required argument: 'y'"]),
        (plain, (1, 2, 3, 4), {}, ["too many positional arguments"]),
        (plain, (1,), {"x": 2}, ["missing a required argument: 'y'", "multiple values for argument 'x'"]),
        (
            keyed,
            (1, 2),
            {"other": 3, "another": 4},
            [
                "too many positional arguments",
                "missing a required argument: 'mask'",
                "got an unexpected keyword argument 'other'",
                "got an unexpected keyword argument 'another'",
            ],
        ),
        (open_ended, (1, 2, 3), {"other": 4}, ["missing a required argument: 'mask'"]),
    ],
)
def test_all_faults_are_named(
    function: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any], faults: list[str]
) -> None:
    """What is missing, too many and unknown is named at once."""
    assert binding_faults(inspect.signature(function), args, kwargs) == faults
