"""Gradients that a step takes away: the model's are None after a run, of others there is none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import whence
from whence.errors import StaleCapture, UnsupportedStep

X = torch.randn(3, 4)


def _set(model: nn.Module, _: SGD) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _delete(model: nn.Module, _: SGD) -> None:
    for parameter in model.parameters():
        del parameter.grad


WAYS: dict[str, Callable[[nn.Module, SGD], None]] = {
    "set": _set,
    "deleted": _delete,
    "by the module": lambda model, _: model.zero_grad(),
    "by the optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "zeroed": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
}


def stepper(
    way: Callable[[nn.Module, SGD], None], *, of_other: bool
) -> tuple[Any, nn.Module, SGD, nn.Module]:
    """A step that takes gradients away, of its model or of another one."""
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.Linear(4, 2)
    optimizer, its = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        way(other, its) if of_other else way(model, optimizer)
        if of_other:
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model, optimizer, other


@pytest.mark.parametrize("name", sorted(WAYS.keys() - {"zeroed"}))
def test_a_frozen_parameter_loses_what_it_had(name: str) -> None:
    found = []
    for is_captured in (False, True):
        step, model, optimizer, _ = stepper(WAYS[name], of_other=False)
        step(X)
        model[1].bias.requires_grad_(False)  # type: ignore[index]
        program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
        call = program.bind(model, optimizer) if is_captured else step
        found.append([call(X), call(X), *(parameter.grad for parameter in model.parameters())])
    for eager, ours in zip(*found, strict=True):
        assert (eager is None) is (ours is None) and (eager is None or torch.equal(eager, ours))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_gradients_of_others_are_refused(way: Callable[[nn.Module, SGD], None]) -> None:
    """Where there are some at the capture, and where some have come since."""
    step, model, optimizer, other = stepper(way, of_other=True)
    run = whence.capture_step(step, (X,), model=model, optimizer=optimizer).bind(model, optimizer)
    run(X)
    other(X).sum().backward()
    held = [parameter.grad for parameter in other.parameters()]
    with pytest.raises(StaleCapture, match=r"the gradient of a tensor \[2, 4\] outside the model"):
        run(X)
    with pytest.raises(UnsupportedStep, match=r"takes away the \.grad of a tensor \[2, 4\]"):
        whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    assert all(now.grad is before for now, before in zip(other.parameters(), held, strict=True))
    both = nn.ModuleList([model, other])
    whence.capture_step(step, (X,), model=both, optimizer=optimizer).bind(both, optimizer)(X)
    left = [parameter.grad for parameter in other.parameters()]
    assert all(each is None or not each.any() for each in left)
