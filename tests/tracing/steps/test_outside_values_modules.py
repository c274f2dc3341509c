"""Modules, optimizers and schedules around a step are those of the capture, and change as in eager mode."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import whence
from tests.tracing.steps.small import batch, small


class Metric(nn.Module):
    """Keeps what it sees, as a number, under a name, in a list and in a buffer."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.last: Tensor | None = None
        self.losses: list[Tensor] = []
        self.register_buffer("total", torch.zeros(()))

    def forward(self, loss: Tensor) -> Tensor:
        """The loss, as it is."""
        self.seen += 1
        self.last = loss.detach()
        self.losses.append(self.last)
        self.total += self.last
        return loss

    def left(self) -> list[float]:
        """All that it keeps."""
        return [self.seen, float(self.last or 0), *map(float, self.losses), float(self.total)]


def trainer() -> SimpleNamespace:
    """A model, an optimizer, and what else a step needs."""
    torch.manual_seed(0)
    net, optimizer = small()
    held = SimpleNamespace(
        net=net,
        optimizer=optimizer,
        schedule=StepLR(optimizer, 2, 0.5),
        criterion=nn.HuberLoss(delta=0.5),
        metric=Metric(),
    )

    def step(x: Tensor) -> Tensor:
        held.optimizer.zero_grad()
        found = held.net(x)
        loss = held.metric(held.criterion(found, torch.zeros_like(found)))
        loss.backward()
        held.optimizer.step()
        held.schedule.step()
        return loss.detach()

    held.step = step
    return held


def captured(held: SimpleNamespace) -> Any:
    program = whence.capture_step(held.step, (batch(),), model=held.net, optimizer=held.optimizer)
    return program.bind(held.net, held.optimizer)


def test_what_a_step_changes_in_modules_is_changed() -> None:
    """As eager does."""
    eager, bound = trainer(), trainer()
    run = captured(bound)
    for number in range(4):
        assert torch.equal(eager.step(batch() * number), run(batch() * number))
    assert eager.metric.left() == bound.metric.left()


def another_linear(held: SimpleNamespace) -> None:
    name, linear = next((name, each) for name, each in held.net.named_children())
    setattr(held.net, name, type(linear)(linear.in_features, linear.out_features))


CHANGES: dict[str, Callable[[SimpleNamespace], object]] = {
    "number of a criterion": lambda held: setattr(held.criterion, "delta", 0.1),
    "criterion": lambda held: setattr(held, "criterion", nn.HuberLoss(delta=0.1)),
    "class of the criterion": lambda held: setattr(held, "criterion", nn.MSELoss()),
    "buffer": lambda held: setattr(held.metric, "total", torch.ones(())),
    "hook": lambda held: held.metric.register_forward_hook(lambda _module, _args, output: output * 2),
    "optimizer": lambda held: setattr(held, "optimizer", torch.optim.SGD(held.net.parameters(), lr=1.0)),
    "schedule": lambda held: setattr(held, "schedule", StepLR(held.optimizer, 1, 0.1)),
    "model": lambda held: setattr(held, "net", small()[0]),
    "layer of the model": another_linear,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_found(change: Callable[[SimpleNamespace], object]) -> None:
    """Before anything is changed."""
    held = trainer()
    run, model = captured(held), held.net
    run(batch())
    change(held)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(whence.StaleCapture):
        run(batch())
    assert all(map(torch.equal, before, model.parameters()))


def test_another_layer_runs_in_a_bound_forward() -> None:
    """A program without an optimizer takes the tensors that the model has now."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4)
    run = whence.capture(model, (x,)).bind(model)
    run(x)
    model[0] = nn.Linear(4, 3)
    assert torch.equal(run(x), model(x))


class Lit(nn.Module):
    """A module that holds the model, and the step with what it counts."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.net, self.optimizer, self.steps = net, optimizer, 0

    def training_step(self, x: Tensor) -> Tensor:
        """One step."""
        self.steps += 1
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def test_a_step_of_another_module_than_the_model() -> None:
    """The model is a part of it."""
    lit = Lit(*small())
    program = whence.capture_step(lit.training_step, (batch(),), model=lit.net, optimizer=lit.optimizer)
    run = program.bind(lit.net, lit.optimizer)
    run(batch()), run(batch())
    assert lit.steps == 2
