"""Constructions from third-party libraries are bitwise: forward, joint and three optimizer steps."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import whence
from tests.checks import differing
from tests.libraries.rows import LibraryCase
from tests.libraries.table import LIBRARIES, ROWS
from tests.models import ModelCase
from tests.test_table import one_run
from tests.tracing.steps.twins import trained_alike_by

# Their imports and models warn of what is theirs: escapes, deprecations, shapes.
pytestmark = pytest.mark.filterwarnings("ignore")


def rows_with(kind: str) -> pytest.MarkDecorator:
    """The rows of which there is this kind, on libraries that are here."""
    rows = [row for row in ROWS if row.is_installed and kind not in row.without]
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_is_installed(library: str) -> None:
    """Rows of a library that is not installed are one skipped test."""
    if any(library in row.missing for row in ROWS):
        pytest.skip(f"{library} is not installed: pip install 'whence[libraries]', or make test-libraries")


@rows_with("forward")
def test_forward_is_eager(row: LibraryCase) -> None:
    """In evaluation, program and tree are the model bit for bit, and no guard gives a false alarm."""
    with row.expected("forward"), torch.no_grad() if row.forward_alone else nullcontext():
        _program_and_tree(replace(row.case, training=False), "forward")


@rows_with("joint")
def test_joint_is_eager(row: LibraryCase) -> None:
    """In training, program and tree have eager's outputs, gradients and buffers bit for bit."""
    with row.expected("joint"):
        _program_and_tree(row.case, "loss")


@rows_with("steps")
def test_three_steps_are_eager(row: LibraryCase) -> None:
    """Three bound steps leave eager's loss, parameters, buffers, gradients, optimizer and random numbers."""
    with row.expected("steps"):
        trained_alike_by(row.case, row.make_optimizer or _adamw)


DECIDED = [(row, kind) for row in ROWS if row.is_installed for kind in row.decide]


@pytest.mark.parametrize(
    ("row", "kind"), DECIDED, ids=lambda each: each if isinstance(each, str) else each.name
)
def test_the_example_decides(row: LibraryCase, kind: str) -> None:
    """Where values decide, program and tree take the example's way, bit for bit, and say what was decided."""
    training = kind == "joint"
    program = _program_and_tree(
        replace(row.case, training=training), "loss" if training else "forward", decide="example"
    )
    assert program.decisions


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def _program_and_tree(case: ModelCase, mode: str, *, decide: str | None = None) -> whence.Program:
    model, args, kwargs = case.make()
    backward = case.loss if mode == "loss" else False
    program = whence.capture(model, args, kwargs, backward=backward, decide=decide)
    assert program.check(model, args, kwargs) == []
    result = program.verify(model, args, kwargs)
    assert result.ok, str(result)
    original, *again = case.make()
    expected = one_run(case, original, (again[0], again[1]), mode, tree=False)
    assert differing(expected, one_run(case, program.unflatten(), (args, kwargs), mode, tree=True)) == []
    return program
