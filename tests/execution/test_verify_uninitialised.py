"""`torch.empty` that is read before it is written is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

Body = Callable[[nn.Module, Tensor], Any]


class Filling(nn.Module):
    """Runs a function in a module of its own."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x * self.weight)


def added(_: nn.Module, x: Tensor) -> Tensor:
    return x + torch.empty(3)


def returned(_: nn.Module, x: Tensor) -> Tensor:
    return x.new_empty(3)


def half_written(_: nn.Module, x: Tensor) -> Tensor:
    out = torch.empty(3)
    out[:2] = x[:2]
    return out


def kept(module: nn.Module, x: Tensor) -> Tensor:
    module.get_buffer("kept").copy_(torch.empty(3))
    return x


def in_a_gradient(_: nn.Module, x: Tensor) -> Tensor:
    return (x * x.new_empty(3)).sum() * 0 + x.sum()


def written(_: nn.Module, x: Tensor) -> Any:
    out = torch.empty(3)
    out[:2] = x[:2]
    out[2] = x[0]
    noise = torch.empty_like(x).bernoulli_(0.5) + torch.empty(3).normal_() + torch.empty(3).uniform_()
    return out, x * noise, torch.empty(3).fill_(2) * x, torch.cat([torch.empty(0), x]), torch.empty(3).size()


def hidden(_: nn.Module, x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.empty(3)) + torch.empty(3, dtype=torch.int64).zero_()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("body", "reached"),
    [
        (added, {"output output"}),
        (half_written, {"output output"}),
        (kept, {"state 0.kept"}),
        (in_a_gradient, {"output output", "gradient 0.weight", "gradient args[0]"}),
    ],
)
def test_read_of_unwritten_memory_is_named(body: Body, reached: set[str], backward: bool) -> None:
    """Its module, its line and what it reaches are in the verification, whatever numbers were there."""
    model, x = nn.Sequential(Filling(body)), torch.ones(3, requires_grad=True)
    result = whence.capture(model, (x,), backward=backward).verify(model, (x,))
    (said,) = result.uninitialised
    named, _, found = said.partition(" reaches ")
    assert "in module 0, at " in named and f" in {body.__name__}" in named
    assert set(found.split(", ")) == reached
    assert said in str(result) and result.to_dict()["uninitialised"] == [said]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("body", [written, hidden])
def test_written_memory_is_not_named(body: Body, backward: bool) -> None:
    """Memory that is written everywhere, in pieces or with random numbers, or that nothing uses."""
    model, x = Filling(body), torch.ones(3)
    result = whence.capture(model, (x,), backward=backward).verify(model, (x,))
    assert result.ok and result.uninitialised == ()


def test_step_that_reads_unwritten_memory() -> None:
    """The verification of a training step says so, too."""
    model, x = Filling(kept), torch.ones(3)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    result = whence.capture_step(step, (x,), model=model).verify(model, (x,))
    (said,) = result.uninitialised
    assert said.endswith("reaches state kept")


def test_unwritten_memory_that_is_returned() -> None:
    """A result may be that memory itself."""
    model, x = Filling(returned), torch.ones(3)
    (said,) = whence.capture(model, (x,)).verify(model, (x,)).uninitialised
    assert said.endswith("reaches output output")
