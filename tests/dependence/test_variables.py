"""Globals, closures and the environment: what code near the model reads is guarded."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.ones(2, 4, requires_grad=True)
SOURCE = """
import os
import torch
from torch import nn

class Thing:
    offset = 1.0

    def __init__(self, factor):
        self.factor = factor

    def grown(self, x):
        return x * 2


SCALE, FLAG, OPTIONS, SHIFT, NAMES = 2.0, True, {"power": 2}, torch.ones(4), ("a", "b")
TABLE, THING = None, Thing(2.0)


def other(x):
    return x


def inner(x):
    return x * SCALE if FLAG else x


def helper(x):
    global TABLE
    if TABLE is None:
        TABLE = torch.arange(4.0)
    if os.environ.get("WHENCE_TEST_FAST") == "1":
        x = x + 1
    x = THING.grown(inner(x)) * THING.factor + THING.offset
    return x ** OPTIONS["power"] + SHIFT + TABLE + len(NAMES)


class Model(nn.Module):
    def forward(self, x):
        return helper(x)
"""


def world() -> ModuleType:
    """A file of a user's with a model whose helpers read variables."""
    made = ModuleType("world_of_variables")
    exec(compile(SOURCE, "/variables.py", "exec"), vars(made))
    return made


def _environment(_: Any) -> None:
    os.environ["WHENCE_TEST_FAST"] = "1"


CHANGES: dict[str, Callable[[Any], object]] = {
    "global SCALE": lambda made: setattr(made, "SCALE", 3.0),
    "global FLAG": lambda made: setattr(made, "FLAG", False),
    "global OPTIONS": lambda made: made.OPTIONS.update(power=3),
    "global SHIFT": lambda made: setattr(made, "SHIFT", torch.ones(4)),
    "global NAMES": lambda made: setattr(made, "NAMES", ("a",)),
    "os.environ['WHENCE_TEST_FAST']": _environment,
    "global helper": lambda made: setattr(made, "helper", made.other),
    "global inner": lambda made: setattr(made, "inner", made.other),
    "THING.factor": lambda made: setattr(made, "THING", made.Thing(3.0)),
    "THING.offset": lambda made: setattr(made.THING, "offset", 3.0),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_variable_is_a_violation(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the variables that helpers name holds something else, `check` names it, and it alone."""
    monkeypatch.delenv("WHENCE_TEST_FAST", raising=False)
    made: Any = world()
    model = made.Model()
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    model(X)  # fills a cache, which is no matter
    assert program.check(made.Model(), (X,)) == []
    made.THING = made.Thing(2.0)  # another of the kind
    assert program.check(model, (X,)) == []
    CHANGES[what](made)
    assert [violation.guard.what for violation in program.check(model, (X,))] == [what]
    with pytest.raises(whence.StaleCapture, match="no longer holds"):
        program.guarded(model)(X)
    assert what in str(program.guards)


def test_replaced_target_in_the_closure_of_a_loss_is_a_violation() -> None:
    """The loss of a program is that of the target which it was captured with."""

    def closed_over() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], None]]:
        target = torch.zeros(2, 4)

        def loss(output: Tensor) -> Tensor:
            return ((output - target) ** 2).mean()

        def replace(other: Tensor) -> None:
            nonlocal target
            target = other

        return loss, replace

    loss, replace = closed_over()
    model = nn.Linear(4, 4)
    program = whence.capture(model, (X,), backward=loss)
    assert program.check(model, (X,)) == []
    replace(torch.ones(2, 4))
    (violation,) = program.check(model, (X,))
    assert violation.guard.what == "closure target"
    with pytest.raises(whence.StaleCapture):
        program.bind(model)(X)


def test_bound_step_notices_a_variable_that_the_model_reads() -> None:
    """Read in the model that the step calls, and not in the step itself."""
    made = world()
    model = nn.Sequential(nn.Linear(4, 4), made.Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    program = whence.capture_step(step, (X.detach(),), model=model, optimizer=optimizer)
    bound = program.bind(model, optimizer)
    bound(X.detach())
    vars(made)["SCALE"] = 5.0
    with pytest.raises(whence.StaleCapture, match="global SCALE"):
        bound(X.detach())
