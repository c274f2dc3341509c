"""The programs that a command line names, and what is shown while they are made."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from whence.api import Program, beside, capture
from whence.api import load as saved
from whence.dependence.asking import Failed, attempt
from whence.errors import UsageError, WhenceError
from whence.models import NamedModel, called, load, mean_square
from whence.program.names import InWords

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
    if not is_saved(name):
        return captured(built(name), backward=backward)
    with working(f"reading {name}"):
        return saved(name)


def is_saved(name: str) -> bool:
    """Whether the name is that of a file."""
    return name.endswith(SAVED)


def program_and_other(
    name: str, other: str | None, *, backward: bool, loss: str | None = None, binds: bool = True
) -> tuple[Program, NamedModel]:
    """The program of a model, or the one in a file, and the `other` model: without, the one of the program.

    A training step has the `loss` of that name. The program of a file gets the tensors of the model where it
    `binds`. Raises `UsageError` for a file without another model, and `StaleCapture` for one whose tensors
    do not fit.
    """
    if not is_saved(name):
        named = _with_loss(built(name), loss)
        return captured(named, backward=backward), named if other is None else built(other)
    if other is None:
        remedy = f"name the one that it is about: {name} package.module:factory"
        raise UsageError(f"{name} holds a program, and no model", remedy=remedy)
    named = _with_loss(built(other), loss)
    given = None if loss is None else named.loss
    with working(f"reading {name}"):
        if binds:
            return saved(name, model=named.model, loss_function=given), named
        return beside(name, named.model, given), named


def _with_loss(named: NamedModel, loss: str | None) -> NamedModel:
    return named if loss is None else replace(named, loss=called(loss))


def runnable(program: Program, named: NamedModel, loss: str | None) -> Program:
    """The program with its loss, of which a file keeps the name; raises `UsageError` where nobody says it."""
    if not isinstance(program.loss_function, InWords):
        return program
    if loss is None and program.loss_function.text != mean_square.__name__:
        raise UsageError(
            f"the file keeps of the loss its name alone, {program.loss_function}",
            remedy="say where it is: --loss package.module:function",
        )
    return program.under(loss_function=named.loss)


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
