"""What is read of an object that a variable holds counts, whoever the object was given to."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.ones(3)
HERE = sys.modules[__name__]


class Settings:
    """What people keep in a variable."""

    shared = 2.0

    def __init__(self) -> None:
        self.value, self.entries, self.row = 2.0, {"a": 2.0}, [2.0, 3.0]

    def get(self) -> float:
        return self.value

    def through(self) -> float:
        return self.get()

    @property
    def computed(self) -> float:
        return self.value


class Slotted:
    """Settings that have no dictionary."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 2.0


class Outer:
    """Settings inside of settings."""

    def __init__(self) -> None:
        self.inner = Settings()


SETTINGS, SLOTTED, OUTER, ROW, TABLE = Settings(), Slotted(), Outer(), [Settings()], {"a": Settings()}
KEY = "a"


def value_of(settings: Any) -> Any:
    return settings.value


def through(settings: Any) -> Any:
    return value_of(settings)


def settings() -> Settings:
    """How people get at theirs."""
    return SETTINGS


class Model(nn.Module):
    """Multiplies by what a function gives."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return x * self.run()


READ: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "an argument": (lambda: value_of(SETTINGS), lambda: SETTINGS),
    "an argument handed on": (lambda: through(SETTINGS), lambda: SETTINGS),
    "without a dictionary": (lambda: through(SLOTTED), lambda: SLOTTED),
    "in another": (lambda: value_of(OUTER.inner), lambda: OUTER.inner),
    "in a row": (lambda: value_of(ROW[0]), lambda: ROW[0]),
    "in a table": (lambda: value_of(TABLE[KEY]), lambda: TABLE["a"]),
    "returned": (lambda: settings().value, lambda: SETTINGS),
    "a method of what is returned": (lambda: settings().through(), lambda: SETTINGS),
    "computed": (lambda: settings().computed, lambda: SETTINGS),
    "asked by text": (lambda: getattr(settings(), "value", 1.0), lambda: SETTINGS),
}


@pytest.mark.parametrize(("run", "holder"), READ.values(), ids=READ)
def test_attributes_are_compared(
    run: Callable[[], Any], holder: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which code reads them has no part in it."""
    model = Model(run)
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    monkeypatch.setattr(holder(), "value", 5.0)
    assert torch.equal(model(X), X * 5)
    assert program.check(model, (X,)) != []


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[pytest.MonkeyPatch], Any]]] = {
    "an entry": (lambda: settings().entries["a"], lambda put: put.setitem(SETTINGS.entries, "a", 5.0)),
    "an item": (lambda: settings().row[0], lambda put: put.setattr(SETTINGS, "row", [5.0, 3.0])),
    "of its class": (lambda: settings().shared, lambda put: put.setattr(Settings, "shared", 5.0)),
    "over its class": (
        lambda: settings().shared,
        lambda put: put.setattr(SETTINGS, "shared", 5.0, raising=False),
    ),
    "absent": (
        lambda: getattr(settings(), "absent", 2.0),
        lambda put: put.setattr(SETTINGS, "absent", 5.0, raising=False),
    ),
    "a method": (
        lambda: settings().get(),
        lambda put: put.setattr(SETTINGS, "get", lambda: 5.0, raising=False),
    ),
    "another object": (lambda: settings().value, lambda put: put.setattr(HERE, "SETTINGS", _another())),
}


def _another() -> Settings:
    found = Settings()
    found.value = 5.0
    return found


@pytest.mark.parametrize(("run", "change"), CHANGED.values(), ids=CHANGED)
def test_what_else_is_read_is_compared(
    run: Callable[[], Any], change: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries, what the class has, and what is not there."""
    model = Model(run)
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    change(monkeypatch)
    assert torch.equal(model(X), X * 5)
    assert program.check(model, (X,)) != []


def test_what_is_not_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """And another object that is like it may be there."""
    model = Model(lambda: value_of(SETTINGS))
    program = whence.capture(model, (X,))
    monkeypatch.setattr(SETTINGS, "row", [1.0])
    assert program.check(model, (X,)) == []
    monkeypatch.setattr(HERE, "SETTINGS", Settings())
    assert program.check(model, (X,)) == []


def _written() -> float:
    settings().value = 3.0
    try:
        return value_of(settings())
    finally:
        settings().value = 2.0


def test_what_the_run_writes_first_is_nothing_it_depends_on() -> None:
    """It is given back, and another run writes it again."""
    model = Model(_written)
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    assert program.verify(model, (X,)).ok


NUMBERS = {f"number {position}": 2.0 for position in range(200)}


def number(name: str) -> float:
    return NUMBERS[name]


@pytest.mark.parametrize(
    ("run", "counts"),
    [(lambda: number("number 70"), True), (lambda: NUMBERS["number 7"], False)],
    ids=["computed", "spelled"],
)
def test_tables_are_compared_where_keys_are_computed(
    run: Callable[[], float], counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a large one, where code may ask for any entry; one entry, where it asks for that."""
    model = Model(run)
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    monkeypatch.setitem(NUMBERS, "number 71", 5.0)
    assert (program.check(model, (X,)) != []) == counts
    monkeypatch.setitem(NUMBERS, "number 7", 5.0)
    assert program.check(model, (X,)) != []
