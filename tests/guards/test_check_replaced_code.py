"""Reloaders (IPython's `autoreload`) keep a function and put other code and defaults into it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import same_bits

X = torch.ones(2, 4)


class Parent(nn.Module):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor


class Child(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Parent()

    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return self.inner(self.method(Parent.forward(self, x)), factor)

    def method(self, x: Tensor, factor: float = 3.0) -> Tensor:
        return x + factor


def other(self: Any, x: Tensor, factor: float = 5.0) -> Tensor:
    """What a function computes after a reload."""
    return x - factor


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "Child.forward": Child.forward,
    "Parent.forward": Parent.forward,
    "Child.method": Child.method,
}


@pytest.mark.parametrize("part", ["__code__", "__defaults__"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_reloader_puts_into_a_function(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen by a check, also after one that found nothing, and what is guarded is captured again."""
    model = Child()
    program = whence.capture(model, (X,))
    guarded = program.guarded(model, on_violation="recapture")
    guarded(X)
    with monkeypatch.context() as patches:
        patches.setattr(FUNCTIONS[name], part, getattr(other, part))
        assert [v.guard.what for v in program.check(model)] == [name]
        assert same_bits(guarded(X), model(X))
    assert program.check(model) == []


def summed(output: Tensor) -> Tensor:
    return output.sum()


def squared(output: Tensor) -> Tensor:
    return output.square().sum()


def test_what_a_reloader_puts_into_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss is compared as a method of the model is, also by what is bound."""
    model = nn.Linear(4, 3)
    program = whence.capture(model, (X,), backward=summed)
    bound = program.bind(model)
    with monkeypatch.context() as patches:
        patches.setattr(summed, "__code__", squared.__code__)
        assert [violation.guard.what for violation in program.check(model)] == ["the loss"]
        with pytest.raises(whence.StaleCapture, match="summed with other code"):
            bound(X)
    assert program.check(model) == []


def test_loss_of_a_file(tmp_path: Path) -> None:
    """A loss that a file is given back is compared; one that it cannot find again is no violation."""
    model = nn.Linear(4, 3)
    whence.capture(model, (X,), backward=lambda output: output.sum()).save(tmp_path / "program")
    assert whence.load(tmp_path / "program", model=model).check(model) == []
    given = whence.load(tmp_path / "program", model=model, loss_function=squared)
    assert [violation.guard.what for violation in given.check(model)] == ["the loss"]
