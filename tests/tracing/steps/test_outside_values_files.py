"""What a step reads in other files of the user's, and under keys of any kind, is compared, too."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributions import Normal

import whence
from tests.tracing.steps.small import batch, small, zero_first

HELPERS = """
RATE, taken = 1.0, 0

def rate():
    return RATE

def counted():
    global taken
    taken += 1
    return taken
"""


def another_file() -> Any:
    """A file beside that of the step, of no package."""
    module = ModuleType("helpers_of_a_project")
    exec(compile(HELPERS, "helpers_of_a_project.py", "exec"), vars(module))
    return module


def scaled_by(scale: Callable[[], Any]) -> Callable[[Tensor], Any]:
    """A bound step that computes with what a function gives."""
    model, optimizer = small()
    inner = zero_first(model, optimizer)

    def step(x: Tensor) -> Any:
        return inner(x) * scale()

    return whence.capture_step(step, (batch(),), model=model, optimizer=optimizer).bind(model, optimizer)


def test_a_variable_of_another_file_is_compared() -> None:
    """That file has no package in common with the step's."""
    helpers = another_file()
    run = scaled_by(helpers.rate)
    run(batch())
    helpers.RATE = 3.0
    with pytest.raises(whence.StaleCapture, match="RATE"):
        run(batch())


def test_what_another_file_counts_is_advanced() -> None:
    helpers = another_file()
    run = scaled_by(helpers.counted)
    assert helpers.taken == 0
    run(batch())
    run(batch())
    assert helpers.taken == 2


class Key:
    """Compared by who it is."""


@pytest.mark.parametrize("key", [Key(), nn.Linear(1, 1), (Key(), 1)], ids=["object", "module", "tuple"])
def test_entries_under_any_key_are_compared(key: object) -> None:
    """A key that no file could spell is called by where it stands."""
    table = {key: {"scale": [1.0]}}
    run = scaled_by(lambda: table[key]["scale"][0])
    run(batch())
    table[key]["scale"][0] = 3.0
    with pytest.raises(whence.StaleCapture, match=rf"table\[{type(key).__name__} 0\]\['scale'\]"):
        run(batch())


def test_what_a_distribution_holds_is_compared() -> None:
    """Reads of torch's own objects are not seen, and all their numbers and tensors count."""
    held = {"noise": Normal(0.0, 1.0)}
    run = scaled_by(lambda: held["noise"].scale)
    run(batch())
    held["noise"] = Normal(0.0, 3.0)
    with pytest.raises(whence.StaleCapture, match=r"held\['noise'\]\.scale"):
        run(batch())
