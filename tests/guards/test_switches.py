"""What code asks of the process is guarded where it asks, and there alone."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whence

X = torch.ones(2)
LOGGER = logging.getLogger("tests.guards.switches")


@contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    LOGGER.setLevel(logging.ERROR)
    yield
    LOGGER.setLevel(logging.NOTSET)


ASKED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
    "number of threads": (lambda x: x * torch.get_num_threads(), _threads),
    "levels of loggers": (lambda x: x * 2 if LOGGER.isEnabledFor(logging.WARNING) else x * 3, _quiet),
    "working directory": (lambda x: x * len(os.getcwd()), lambda: chdir("/")),  # noqa: PTH109
}


@pytest.mark.parametrize("what", ASKED)
def test_what_code_asks_by_name(what: str) -> None:
    """It is a guard of what asks; for what does not, it may be anything."""
    function, around = ASKED[what]
    program, other = whence.capture(function, (X,)), whence.capture(torch.sin, (X,))
    assert program.check(function, (X,)) == []
    with around():
        assert [violation.guard.what for violation in program.check(function, (X,))] == [what]
        assert other.check(torch.sin, (X,)) == []


def test_files_are_named(tmp_path: Path) -> None:
    """Nobody looks again at what code has read of a file; that is said."""
    file = tmp_path / "scale.txt"
    file.write_text("2.0")

    def scaled(x: Tensor) -> Tensor:
        return x * float(file.read_text())

    guards = whence.capture(scaled, (X,)).guards
    assert "files at which code looks (read_text)" in [row.what for row in guards.unguarded]
    assert not any(row.what.startswith("files") for row in whence.capture(torch.sin, (X,)).guards.unguarded)
