import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whence
from tests.tracing.failing import Doing


def seeded(m: Doing, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return m.linear(x)


def recovered(m: Doing, x: Tensor) -> Tensor:
    try:
        m.linear(x[:, :1])
    except RuntimeError:
        torch.manual_seed(0)
    return x * 2


def drew(m: Doing, x: Tensor) -> Tensor:
    return m.linear(x) * random.random()


def drew_in_numpy(m: Doing, x: Tensor) -> Tensor:
    return m.linear(x) * float(np.random.rand())


def everything(m: Doing, x: Tensor) -> Tensor:
    m.linear(x).sum().backward()
    return seeded(m, x) + drew(m, x)


@pytest.mark.parametrize(
    ("body", "effects"),
    [
        (drew, ["draws from Python's random module"]),
        (drew_in_numpy, ["draws from NumPy's default generator"]),
        (seeded, ["sets the state of the random number generator"]),
        (
            everything,
            [
                "writes the gradients of linear.weight, linear.bias",
                "draws from Python's random module",
                "sets the state of the random number generator",
            ],
        ),
    ],
    ids=["drew", "drew in numpy", "seeded", "everything"],
)
def test_side_effects_are_refused_together(body: Callable[..., Any], effects: list[str]) -> None:
    """Gradients, Python's random numbers and torch's seed are named in one error, each with its remedy."""
    model = Doing(body)
    model.zero_grad()
    with pytest.raises(whence.SideEffect) as caught:
        whence.capture(model, (torch.ones(2, 4),))
    error = caught.value
    said = [what.partition(" (")[0] for what in error.what.split("; ")]
    assert said == [f"Doing {effect} while it runs" for effect in effects]
    assert str(error).count("what to do: ") == len(effects)
    lines = [error.where.line] if error.where.line else error.what.split("; ")
    assert all(re.search(r"in (Doing.forward|seeded|drew|drew_in_numpy)\)?$", line) for line in lines)


def test_side_effect_is_not_blamed_on_a_module_that_failed_before() -> None:
    """A model that caught an error of its own, and then seeds: the module that failed is not named."""
    with pytest.raises(whence.SideEffect) as caught:
        whence.capture(Doing(recovered), (torch.ones(2, 4),))
    assert caught.value.where.module == ""


def test_the_generator_of_numpy_is_given_back() -> None:
    """A draw that is refused has not happened."""
    before: Any = np.random.get_state()
    with pytest.raises(whence.SideEffect):
        whence.capture(Doing(drew_in_numpy), (torch.ones(2, 4),))
    after: Any = np.random.get_state()
    assert before[0] == after[0]
    assert (before[1] == after[1]).all()
    assert before[2:] == after[2:]


def test_a_gradient_that_is_there_is_not_added_to() -> None:
    """A backward() inside the model is refused also where it would only add; the gradient is as it was."""

    def backward_inside(m: Doing, x: Tensor) -> Tensor:
        m.linear(x).sum().backward()
        return x * 2

    model = Doing(backward_inside)
    x = torch.ones(2, 4)
    model(x)
    gradient = model.linear.weight.grad
    assert gradient is not None
    before, writes = gradient.clone(), gradient._version
    with pytest.raises(whence.SideEffect, match="writes the gradients of linear"):
        whence.capture(model, (x,))
    assert model.linear.weight.grad is gradient
    assert torch.equal(gradient, before)
    assert gradient._version == writes


class Recurrence(nn.Module):
    """Which autograd cannot differentiate, and keeps: what a product has saved is written after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        for at in range(1, 4):
            hidden[:, at] = hidden[:, at] + hidden[:, at - 1] * self.linear.bias[at]
        return hidden


@pytest.mark.sweep
def test_what_autograd_keeps_in_a_circle_is_no_state() -> None:
    model, x = Recurrence(), torch.randn(2, 4)
    assert whence.capture(model, (x,)).verify(model, (x,)).ok
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        whence.capture(model, (x,), backward=torch.sum)


class Offloading(nn.Module):
    """Keeps what the backward needs where a hook puts it: on a CPU, the result itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.linear(x).tanh().exp()


@pytest.mark.parametrize("backward", [False, torch.sum])
@pytest.mark.sweep
def test_results_that_a_hook_gives_back_are_no_state(backward: Any) -> None:
    """They are in a circle with the node that made them, in eager, too."""
    model, x = Offloading(), torch.randn(2, 4)
    assert whence.capture(model, (x,), backward=backward).verify(model, (x,)).ok
