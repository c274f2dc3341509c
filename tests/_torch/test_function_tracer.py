"""Functions of the user's are seen to begin, and nothing that is called on behalf of our own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from whence._torch.function_tracer import FunctionTracer, Untold, beside, untold


def _users() -> None: ...


def _ours(functions: FunctionTracer) -> None:
    _inside()
    functions.told(_users)


def _inside() -> None: ...


def _begun(functions: FunctionTracer, names: list[str]) -> Iterator[None]:
    def met(frame: FrameType) -> bool:
        names.append(frame.f_code.co_name)
        return True

    with functions.seen_by(met):
        yield


def test_our_own_functions_are_not_told_of_but_those_of_users_that_they_call() -> None:
    """Also where several listen, and where our own code calls more of our own."""
    functions, outer, inner = FunctionTracer(), list[str](), list[str]()
    for _ in _begun(functions, outer):
        for _ in _begun(functions, inner):
            untold(untold, _ours, functions)
        untold(_inside)
    assert "_users" in outer
    assert "_users" in inner
    assert not {"_ours", "_inside"} & {*outer, *inner}


def test_tracing_ends_with_its_block_although_our_own_code_ends_it() -> None:
    """A context that listens is left by code that nobody is told of."""
    functions, names, before = FunctionTracer(), list[str](), sys.gettrace()
    with Untold(contextmanager(_begun)(functions, names)):
        _users()
    _inside()
    assert "_users" in names
    assert "_inside" not in names
    assert sys.gettrace() is before


def test_errors_leave_tracing_as_it_was() -> None:
    """What our own code raises, and what the user's raises inside of it."""
    functions, names = FunctionTracer(), list[str]()

    def fails() -> None:
        raise ValueError

    for _ in _begun(functions, names):
        for work in (lambda: untold(fails), lambda: untold(functions.told, fails)):
            try:
                work()
            except ValueError:
                _users()
        assert names.count("fails") == 1
    assert names.count("_users") == 1


def test_a_block_of_our_own_is_not_told_of() -> None:
    """But what is told inside of it is, and what comes after it; without a listener it is any block."""
    functions, names, before = FunctionTracer(), list[str](), sys.gettrace()
    for _ in _begun(functions, names):
        with functions.aside():
            _ours(functions)
        untold(_inside)
        assert names.count("_users") == 1
        assert "_ours" not in names
        _inside()
    assert "_inside" in names
    with functions.aside():
        _users()
    assert (names.count("_users"), sys.gettrace()) == (1, before)


def test_tracers_of_others_hear_of_everything() -> None:
    """A debugger is not put aside."""
    seen, before = list[str](), sys.gettrace()
    sys.settrace(lambda frame, *_: seen.append(frame.f_code.co_name))
    try:
        untold(_inside)
    finally:
        sys.settrace(before)
    assert "_inside" in seen


def _nothing(*_: object) -> None:
    """Follows nothing."""


@pytest.mark.parametrize("kind", ["trace", "profile"])
def test_code_may_have_a_tracer_of_its_own(kind: str) -> None:
    """It is told of what it asks for, beside ours, and that it is alone; ours goes on when it ends."""
    put, now = f"set{kind}", f"get{kind}"
    ours, theirs, before = list[str](), list[str](), getattr(sys, now)()
    with beside(kind, lambda frame, *_: ours.append(frame.f_code.co_name)):  # type: ignore[arg-type]
        assert getattr(sys, now)() is None
        getattr(sys, put)(lambda frame, *_: theirs.append(frame.f_code.co_name))
        _users()
        getattr(sys, put)(_nothing)
        assert getattr(sys, now)() is _nothing
        getattr(sys, put)(None)
        _inside()
    assert "_users" in ours
    assert "_users" in theirs
    assert "_inside" in ours
    assert "_inside" not in theirs
    assert getattr(sys, now)() is before
