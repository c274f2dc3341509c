"""A small model with its optimizer, and the many ways to write a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

Step = Callable[[Tensor], Any]


def small() -> tuple[nn.Sequential, AdamW]:
    """The same bits at every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, AdamW(model.parameters(), lr=0.01)


class Delegating(Optimizer):
    """Stands for the optimizer inside: it has nothing of its own."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inside.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inside.state


def batch(size: int = 6) -> Tensor:
    """The same numbers at every call."""
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size))


def zero_last(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x).sin().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def zero_first(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).sin().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def never_zero(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x).sin().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def zero_by_hand(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> None:
        for held in model.parameters():
            held.grad = None
        model(x).sin().mean().backward()
        optimizer.step()

    return step


def clipped(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = model(x).sin().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        nn.utils.clip_grad_value_(model.parameters(), 0.001)
        optimizer.step()
        return loss, norm

    return step


def microbatches(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for part in x.chunk(3):
            loss = model(part).sin().mean() / 3
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).sum()

    return step


def two_losses(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        found = model(x)
        first, second = found.sin().mean(), found.cos().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return first, second

    return step


def late_loss(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = model(x)
        found.sin().mean().backward(retain_graph=True)
        decay = sum(held.square().sum() for held in model.parameters()) + found.cos().mean()
        decay.backward()
        optimizer.step()
        return decay

    return step


def with_seeds(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        found: Tensor = model(x)
        torch.autograd.backward([found.sin(), found.cos()], [torch.ones_like(found), found.detach()])
        optimizer.step()
        return found

    return step


def penalty(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        value = model(x).sin().sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        loss: Tensor = value + gradient.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def two_steps(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        for _ in range(2):
            optimizer.zero_grad()
            loss: Tensor = model(x).sin().mean()
            loss.backward()
            optimizer.step()
        return loss

    return step


def by_hand(model: nn.Module, _optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sin().sum()
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for held, gradient in zip(model.parameters(), gradients, strict=True):
                held.sub_(gradient, alpha=0.1)
        return loss

    return step


def hooked_activation(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        hidden = model[0](x)  # type: ignore[index]
        hidden.register_hook(lambda gradient: gradient * 2)
        loss: Tensor = model[2](model[1](hidden)).sin().sum()  # type: ignore[index]
        loss.backward()
        optimizer.step()
        return loss

    return step


def returns_state(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        model(x).sin().mean().backward()
        optimizer.step()
        return {"weight": model[0].weight, "gradient": model[0].weight.grad, "size": len(x)}  # type: ignore[index]

    return step


STEPS: dict[str, Callable[[nn.Module, Optimizer], Step]] = {
    made.__name__: made
    for made in (
        *(zero_last, zero_first, never_zero, zero_by_hand, clipped, microbatches, two_losses, late_loss),
        *(with_seeds, penalty, two_steps, hooked_activation, returns_state),
    )
}


def plain_sgd(model: nn.Module) -> SGD:
    """Keeps no state."""
    return SGD(model.parameters(), lr=0.1)
