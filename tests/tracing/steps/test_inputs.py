"""A schedule that cycles momenta beside the rate moves inputs of the program."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import whence
from tests.checks import differing, state
from tests.tracing.steps.small import batch, small, zero_first

MAKERS: list[Callable[[nn.Module], Optimizer]] = [
    lambda model: AdamW(model.parameters()),
    lambda model: AdamW(model.parameters(), foreach=True),
    lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    lambda model: AdamW(model.parameters(), fused=True),
    lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
]
IDS = ["adamw", "foreach", "momentum", "adamw_fused", "momentum_fused"]


def trained(make: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Any, Any, OneCycleLR]:
    model, _ = small()
    optimizer = make(model)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    step = zero_first(model, optimizer)
    step(batch())
    schedule.step()
    return model, optimizer, step, schedule


@pytest.mark.parametrize("make", MAKERS, ids=IDS)
def test_momenta_are_inputs(make: Callable[[nn.Module], Optimizer]) -> None:
    """Rate and momentum follow the schedule, bit for bit."""
    (model, optimizer, step, schedule), (theirs, _, eager, other) = trained(make), trained(make)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert program.verify(model, (batch(),)).ok
    run = program.bind(model, optimizer)
    for _ in range(4):
        assert torch.equal(run(batch()), eager(batch()))
        schedule.step()
        other.step()
        assert differing(state(theirs), state(model)) == []


def test_the_rest_is_compared() -> None:
    """The other beta is a constant still."""
    model, optimizer, step, _ = trained(MAKERS[0])
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert program.input("optimizer.param_groups[0]['betas'][0]").name == "o_param_groups_0_betas_0"
    optimizer.param_groups[0]["betas"] = (0.9, 0.9)
    with pytest.raises(whence.StaleCapture, match="'betas'"):
        program.bind(model, optimizer)(batch())


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
def test_rates_of_fused_kernels_are_inputs(kind: type[Optimizer]) -> None:
    """Kernels that take all parameters at once are given the rate of each call."""
    (model, _), (theirs, _) = small(), small()
    made: Any = kind
    ours, other = (made(each.parameters(), lr=0.1, fused=True) for each in (model, theirs))
    step, eager = zero_first(model, ours), zero_first(theirs, other)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=ours)
    assert program.input("optimizer.param_groups[0]['lr']").value == 0.1
    run = program.bind(model, ours)
    for rate in (0.1, 0.05, 0.3):
        ours.param_groups[0]["lr"] = other.param_groups[0]["lr"] = rate
        assert torch.equal(run(batch()), eager(batch()))
        assert differing(state(theirs), state(model)) == []


def test_a_gradient_with_a_history_is_refused() -> None:
    """Autograd follows it from step to step, which one program cannot."""
    model, optimizer = small()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).sin().mean()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter, alpha=0.1)
        optimizer.step()
        return loss.detach()

    step(batch())
    with pytest.raises(
        whence.UnsupportedStep, match="weight requires a gradient itself when the step begins"
    ):
        whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)


class Codebook(nn.Module):
    """Its loss begins with a zero that is told to require a gradient."""

    zero: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin().mean() + 2 * self.zero.requires_grad_()


def _warm_codebook() -> tuple[Codebook, Optimizer, Callable[[torch.Tensor], Any]]:
    torch.manual_seed(0)
    model = Codebook()
    optimizer = AdamW(model.parameters())
    step = zero_first(model, optimizer)
    step(batch())
    return model, optimizer, step


def test_a_gradient_of_a_buffer_is_added_to() -> None:
    """No `zero_grad` clears it, and every step begins with that of the one before."""
    (model, optimizer, step), (eager, _, in_eager) = _warm_codebook(), _warm_codebook()
    run = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer).bind(model, optimizer)
    for _ in range(3):
        assert torch.equal(run(batch()), in_eager(batch()))
    assert model.zero.grad is not None
    assert eager.zero.grad is not None
    assert torch.equal(eager.zero.grad, model.zero.grad)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
