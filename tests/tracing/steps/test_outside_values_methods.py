"""Methods of what a step reads are code of it, whoever has them: the class, or an object in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

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
