"""Methods of what a step reads are code of it, whoever has them: the class, or an object in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import whence
from tests.tracing.steps.small import batch, small
from tests.tracing.steps.test_outside_values import refusal


class Scaled:
    """Trains with a scale that a method gives."""

    def __init__(self) -> None:
        self.model, self.optimizer = small()

    def scale(self) -> float:
        return 1.0

    @staticmethod
    def static() -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return 1.0

    @property
    def computed(self) -> float:
        return 1.0

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).sin().mean() * self.scale() * self.static() * self.of_class()
        (loss * self.computed).backward()
        self.optimizer.step()
        return loss


class Doubled(Scaled):
    @property
    def computed(self) -> float:
        return 2.0


COVERED: dict[str, Callable[[Any], None]] = {
    "scale": lambda trainer: setattr(trainer, "scale", lambda: 2.0),
    "static": lambda trainer: setattr(trainer, "static", lambda: 2.0),
    "of_class": lambda trainer: setattr(trainer, "of_class", lambda: 2.0),
    "computed": lambda trainer: setattr(trainer, "__class__", Doubled),
}


@pytest.mark.parametrize("name", COVERED)
def test_an_object_may_cover_what_its_class_has(name: str) -> None:
    """A function of its own in the place of a method, and another class, are other code."""
    trainer = Scaled()
    held: dict[str, Any] = {"model": trainer.model, "optimizer": trainer.optimizer}
    run = whence.capture_step(trainer.step, (batch(),), **held).bind(**held)
    run(batch())
    COVERED[name](trainer)
    assert f"`Scaled.{name}` was" in refusal(run, trainer.model)


SCALE = 1.0


class Kept:
    """Settings whose methods call one another, and that are handed on."""

    def __init__(self) -> None:
        self.scale = 1.0

    def through(self) -> float:
        return self.beneath()

    def beneath(self) -> float:
        return SCALE


class Made:
    """Reads a variable when it is made."""

    def __init__(self) -> None:
        self.scale = SCALE


KEPT = Kept()


def through() -> float:
    return KEPT.through()


def scale_of(settings: Any) -> Any:
    return settings.scale


class Scaling(nn.Module):
    """A layer, and what computes with what it gives."""

    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.scale()


@pytest.mark.parametrize("in_model", [True, False])
@pytest.mark.parametrize(
    ("scale", "owner", "name"),
    [
        (through, sys.modules[__name__], "SCALE"),
        (lambda: Made().scale, sys.modules[__name__], "SCALE"),
        (lambda: scale_of(KEPT), KEPT, "scale"),
    ],
    ids=["methods", "constructor", "argument"],
)
def test_what_runs_in_a_step_is_compared(
    scale: Callable[[], float], owner: Any, name: str, in_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However code comes to it: a method, a constructor, a function that gets settings from another."""
    model = Scaling(scale if in_model else lambda: 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).sum() * (1.0 if in_model else scale())
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(2, 4)
    run = whence.capture_step(step, (x,), model=model, optimizer=optimizer).bind(model, optimizer)
    run(x)
    monkeypatch.setattr(owner, name, 5.0)
    with pytest.raises(whence.StaleCapture, match=r"(?i)\bscale"):
        run(x)


class Shared(Optimizer):
    """Has the groups and the state of the optimizer that it holds, and reads that state."""

    def __init__(self, inside: Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside, self.state, self.param_groups = inside, inside.state, inside.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for tensor in group["params"]:
                self.state.get(tensor)
        self.inside.step(closure)


class Ascent:
    """A trainer that holds such a one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, Shared(optimizer)

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).sin().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def test_state_that_an_optimizer_shares_is_no_guard() -> None:
    """It is an input, whoever leads to it; before the first step there is none."""
    model, optimizer = small()
    trainer = Ascent(model, optimizer)
    program = whence.capture_step(trainer.step, (batch(),), model=model, optimizer=trainer.optimizer)
    assert program.check(model) == []
    run = program.bind(model, trainer.optimizer)
    run(batch())
    run(batch())
    assert program.check(model) == []
    assert {int(held["step"]) for held in optimizer.state.values()} == {2}
