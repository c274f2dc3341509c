"""Canaries run what they are for."""

import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests._torch.canaries import SOURCE, lines_that_use


@pytest.fixture(autouse=True)
def runs_what_it_is_for(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a canary while which no line runs that uses what it is marked with."""
    names = [name for mark in request.node.iter_markers("canary") for name in mark.args]
    if not names:
        yield
        return
    wanted = {name: lines_that_use(name, running=True) for name in names}
    with _lines_noted({file for lines in wanted.values() for file, _ in lines}) as ran:
        yield
    idle = [name for name, lines in wanted.items() if lines and not lines & ran]
    assert not idle, f"nothing runs that uses {', '.join(idle)}"


@contextmanager
def _lines_noted(files: Collection[str]) -> Iterator[set[tuple[str, int]]]:
    """The lines of these files of the source that run on any thread inside the block."""
    ran: set[tuple[str, int]] = set()
    start = len(f"{SOURCE}/")
    noted = {f"{SOURCE}/{file}" for file in files}

    def inside(frame: FrameType, _event: str, _argument: Any) -> Any:
        ran.add((frame.f_code.co_filename[start:], frame.f_lineno))
        return inside

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        return inside(frame, event, argument) if frame.f_code.co_filename in noted else None

    before = sys.gettrace()
    sys.settrace(called)
    threading.settrace(called)
    try:
        yield ran
    finally:
        threading.settrace(None)
        sys.settrace(before)
