"""Layers that depend on something nobody sees are traced; what is replayed gives the same program."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import whence
from tests.sameness import differences, first_run
from tests.tracing.replay import outside
from tests.tracing.replay.layered import WIDTH, Block
from tests.tracing.replay.records.test_likeness import MODES


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WHENCE_TEST_COUNT", "1")
    yield
    outside.reset()


@cache
def captured(name: str, mode: str, *, reuse: bool) -> whence.Program:
    """The program of a case, to be read and never to be changed."""
    torch.manual_seed(0)
    outside.reset()
    model, x = outside.CASES[name]().eval(), torch.randn(3, 4, WIDTH)
    return first_run(model, (x,), backward=MODES[mode], reuse=reuse)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", outside.CASES)
@pytest.mark.parametrize("mode", ["loss", pytest.param("forward", marks=pytest.mark.slow)])
def test_program_is_the_same_with_and_without_reuse(name: str, mode: str) -> None:
    """Whatever a layer looks at."""
    assert differences(captured(name, mode, reuse=False), captured(name, mode, reuse=True)) == {}


def reasons(name: str) -> str:
    """Why calls of a case were not replayed."""
    return str(captured(name, "loss", reuse=True).replay)


REASONS = {
    "CountsOnType": "it changes the class CountsOnType",
    "CountsInDefault": "it changes",
    "ByProperty": "outside the model has changed",
    "ByEnvironment": "outside the model has changed",
    "ByGlobals": "may call globals()",
    "ById": "may call id()",
    "ByKey": "can be recognised",
    "ByFrame": "may look at f_back",
    "ByCopy": "copy.copy, which looks or acts outside the model",
    "ByVars": "may call vars()",
    "PastClass": "past their class",
    "ByDescriptor": "may call id()",
    "WritesSlots": "it changes a Slotted",
    "LooksAtHistory": "the model looks at what autograd recorded",
    "Recomputes": "a custom autograd function calls it",
    "MarksResult": "it sets attributes on a tensor",
    "attributes of weights": "its set of attributes",
    "a list given back": "it returns a container that it does not make",
    "a wrapper in itself": "it runs the function that calls it",
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", REASONS)
def test_says_why_it_was_traced(name: str) -> None:
    """In words."""
    assert REASONS[name] in reasons(name)


def test_every_warning_is_heard() -> None:
    """A layer that warns is run each time."""
    model, x = outside.Row(outside.Warns), torch.randn(3, 4, WIDTH)
    heard: list[int] = []
    for reuse in (False, True):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            whence.capture(model, (x,), reuse=reuse)
        heard.append(len(seen))
    assert heard == [4, 4]


@pytest.mark.sweep
def test_values_that_are_the_same_change_nothing() -> None:
    """What could have been changed and was not is no reason to trace."""
    outside.reset()
    for kind in (outside.ByProperty, outside.InList, outside.ByEnvironment, outside.ByThread, outside.BySlot):
        row: Any = outside.Row(kind)
        program = whence.capture(row, (torch.randn(3, 4, WIDTH),), backward=True)
        assert program.replay[kind.__name__].replayed == 2


def test_a_registry_that_grows_too_large_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing everything costs more than tracing then."""
    monkeypatch.setattr(outside, "LISTED", [outside.Shared() for _ in range(5000)])
    program = whence.capture(outside.Row(outside.InList), (torch.randn(3, 4, WIDTH),))
    assert "leads to more than" in str(program.replay)


def test_plain_layers_are_replayed() -> None:
    """The same stack without anything on the side."""
    program = whence.capture(outside.Row(Block), (torch.randn(3, 4, WIDTH),), backward=True)
    assert program.replay["Block"].replayed == 2
