"""Code of the user is run for its answer; of its errors go those that nobody sees."""

from __future__ import annotations

from whence.dependence.asking import Failed, attempt, dismiss, tried


def broken() -> None:
    raise ValueError("broken")


def also_broken() -> None:
    try:
        broken()
    except ValueError:
        raise TypeError("also") from None


def test_frames_of_errors_that_nobody_sees_go() -> None:
    """Those of what led to them, too."""
    found = attempt(also_broken)
    assert isinstance(found, Failed) and found.error.__context__ is not None
    dismiss(found.error)
    assert (found.error.__traceback__, found.error.__context__.__traceback__) == (None, None)


def test_an_error_that_a_caller_handles_keeps_its_frames() -> None:
    """It is in the context of all that is raised meanwhile, and goes on with them."""
    try:
        broken()
    except ValueError as error:
        raised = error.__traceback__
        found = tried(also_broken)
        assert isinstance(found, Failed) and found.error.__traceback__ is None
        assert error.__traceback__ is raised
