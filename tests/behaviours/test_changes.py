"""Every way to change a model after its capture is told of, or rightly passed over."""

import copy
from functools import cache

import pytest

import whence
from tests.guards.changes import ACTIVATIONS, ALL, CHANGES, LEAVES, Row, inputs_of, leaf, make
from whence.dependence.matching import Walk
from whence.execution.validity import check
from whence.guards.memory import Remembered

ROWS = [pytest.param(row, name, id=f"{row.name}-{name}") for row in CHANGES for name in row.on]


@cache
def _program(name: str) -> whence.Program:
    args, kwargs = inputs_of(name)
    return whence.capture(make(name), args, kwargs)


@pytest.mark.sample(62)
@pytest.mark.parametrize(("row", "name"), ROWS)
def test_change(row: Row, name: str) -> None:
    """What is reported is what was changed, under its own name; nothing is where nothing matters."""
    model, program = make(name), _program(name)
    args, kwargs = inputs_of(name)
    row.change(name, model)
    with row.around(name, model):
        violations = program.check(model, args, kwargs)
    found = [violation.guard.what for violation in violations]
    if row.reported is None:
        assert list(map(str, violations)) == []
        return
    kind = type(leaf(name, make(name))).__name__
    expected = row.reported.format_map({"leaf": LEAVES[name], "act": ACTIVATIONS[name], "class": kind})
    assert expected in found


@pytest.mark.sample(62)
@pytest.mark.parametrize(("row", "name"), ROWS)
def test_change_after_a_check(row: Row, name: str) -> None:
    """A check that remembers the one before, when nothing was changed, finds what any other finds."""
    model, program = make(name), _program(name)
    args, kwargs = inputs_of(name)
    memory = Remembered()
    assert check(program, model, args, kwargs, memory).violations == []
    assert memory.last is not None
    assert memory.last.again(program.guards.plan, (model,), Walk(same_model=False)) is not None
    row.change(name, model)
    with row.around(name, model):
        found = check(program, model, args, kwargs, memory).violations
        assert list(map(str, found)) == list(map(str, program.check(model, args, kwargs)))


@pytest.mark.parametrize("name", ALL)
def test_captured_model_itself_holds(name: str) -> None:
    """The captured model and a deep copy of it are not reported."""
    model = make(name)
    args, kwargs = inputs_of(name)
    program = whence.capture(model, args, kwargs)
    assert list(map(str, program.check(model, args, kwargs))) == []
    assert list(map(str, program.check(copy.deepcopy(model), args, kwargs))) == []


def test_the_table_is_long() -> None:
    """There are sixty different ways at least, each with a name of its own."""
    names = [row.name for row in CHANGES]
    assert len(set(names)) == len(names) >= 60
