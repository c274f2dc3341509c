"""A learning rate that the step reads: arithmetic is part of the program, for all else it is a constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._pytree import tree_flatten

import whence
from tests.checks import differing, state
from tests.tracing.steps.small import batch, small
from whence.errors import StaleCapture

Use = Callable[[Tensor, Any], Any]

ARITHMETIC: dict[str, Use] = {
    "returned": lambda loss, rate: {"loss": loss, "rate": [rate]},
    "returned half": lambda loss, rate: (loss, rate * 0.5),
    "numbers of tensors": lambda loss, rate: loss.item() * 0.1 * 3.0 + rate,
    "product": lambda loss, rate: loss * rate,
    "power": lambda loss, rate: loss.square() ** (1 - 2 * rate),
    "full": lambda loss, rate: loss * torch.full((2,), rate),
    "root": lambda loss, rate: loss * math.sqrt(rate),
    "divmod": lambda loss, rate: loss * divmod(rate, 0.03)[1],
    "any number": lambda loss, rate: loss * rate if isinstance(rate, (int, float)) else loss,
}
NEEDED: dict[str, Use] = {
    "text": lambda loss, rate: (loss, str(rate)),
    "representation": lambda loss, rate: (loss, repr([rate])),
    "format": lambda loss, rate: (loss, f"{rate:.3f}"),
    "array": lambda loss, rate: loss * torch.from_numpy(np.array([rate])),
    "key": lambda loss, rate: loss * {0.1: 2.0}.get(rate, 1.0),
    "member": lambda loss, rate: loss * (2.0 if rate in {0.1} else 1.0),
    "real": lambda loss, rate: loss * rate.real,
    "branch": lambda loss, rate: loss * 2 if rate > 0.05 else loss,
}


def stepper(use: Use) -> tuple[Callable[[Tensor], Any], nn.Sequential, SGD]:
    model, _ = small()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).sin().mean()
        loss.backward()
        optimizer.step()
        return use(loss, optimizer.param_groups[0]["lr"])

    return step, model, optimizer


def pair(use: Use) -> tuple[Any, Any, SGD, SGD]:
    """A bound step and the eager one, with their optimizers; each has run once, to the same bits."""
    (step, model, optimizer), (eager, theirs, other) = stepper(use), stepper(use)
    run = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer).bind(model, optimizer)
    assert same(run(batch()), eager(batch()))
    assert differing(state(model), state(theirs)) == []
    return run, eager, optimizer, other


def same(left: Any, right: Any) -> bool:
    (ours, spec), (theirs, other) = tree_flatten(left), tree_flatten(right)
    return spec == other and all(map(same_leaf, ours, theirs))


def same_leaf(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) else repr(left) == repr(right)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_follows_a_schedule(name: str) -> None:
    """The rate is an input, and what is computed of it a part of the program."""
    run, eager, *optimizers = pair(ARITHMETIC[name])
    for one in optimizers:
        one.param_groups[0]["lr"] = 0.05
    assert same(run(batch()), eager(batch()))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NEEDED)
def test_rate_that_is_needed_is_a_constant(name: str) -> None:
    """Whoever wants the number itself gets it; another one is refused."""
    run, _, optimizer, _ = pair(NEEDED[name])
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(StaleCapture, match=r"'lr'\]` was 0.1 at capture, is 0.05 now"):
        run(batch())
