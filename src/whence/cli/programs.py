"""The programs that a command line names, and what is shown while they are made."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from whence.api import Program, capture
from whence.api import load as saved
from whence.dependence.asking import Failed, attempt
from whence.errors import UsageError, WhenceError
from whence.models import NamedModel, load

SAVED = ".whence"


@contextmanager
def working(on: str) -> Iterator[None]:
    """Say on a terminal what is being done, and for how long; nothing is left of it, and pipes have none."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        progress.add_task(on, total=None)
        yield


def program_of(name: str, *, backward: bool) -> Program:
    """The program of a model, or the one in a file, whatever is in that."""
    if not name.endswith(SAVED):
        return captured(built(name), backward=backward)
    with working(f"reading {name}"):
        return saved(name)


def built(name: str) -> NamedModel:
    """Build a model; raises `UsageError` when its factory fails."""
    with working(f"building {name}"):
        named = attempt(lambda: load(name))
    if not isinstance(named, Failed):
        return named
    if isinstance(named.error, WhenceError):
        raise named.error
    error = named.error
    raise UsageError(f"{name} cannot be built: {type(error).__name__}: {error}") from error


def captured(named: NamedModel, *, backward: bool) -> Program:
    """The forward of a model, or its training step."""
    part = "forward and backward" if backward else "the forward"
    with working(f"capturing {part} of {type(named.model).__name__}"):
        return capture(named.model, named.args, named.kwargs, backward=named.loss if backward else False)


def write_page(
    program: Program,
    path: Path,
    *,
    other: Program | None = None,
    device: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Write the page of a program, or of two; raises `UsageError` where nothing can be written."""
    with working(f"writing {path}"):
        try:
            program.view(path, other=other, device=device, sizes=sizes)
        except OSError as error:
            raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> UsageError:
    """The error for a file that cannot be written."""
    return UsageError(f"{path} cannot be written: {error.strerror}")
