"""Training steps as people write them, each over a small model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import whence
from tests.behaviours.constructions import Refusal, numbers


@dataclass
class Training:
    """A model with its optimizer and a step; `between` is what the loop around the step does after each.

    Of a `warm` one the first step is eager's. `kept` is what the step keeps in Python.
    """

    model: Any
    optimizer: Any
    step: Callable[..., Any]
    between: Callable[[], Any] = lambda: None
    kept: Callable[[], Any] = lambda: None
    batches: tuple[tuple[Tensor, ...], ...] = field(
        default_factory=lambda: tuple((numbers(5, 4) * scale,) for scale in (1.0, 0.5, 1.5))
    )


@dataclass(frozen=True, eq=False)
class ConstructedStep:
    """A row: how the training is made, how it is captured, and what is refused."""

    build: Callable[[], Training]
    decide: str | None = None
    refused: Refusal | None = None
    warm: bool = False

    @property
    def name(self) -> str:
        return self.build.__name__

    def make(self) -> Training:
        """The same bits at every call."""
        torch.manual_seed(0)
        made = self.build()
        if self.warm:
            made.step(*made.batches[0])
            made.between()
        return made


STEPS: list[ConstructedStep] = []
Build = Callable[[], Training]


def step(
    *, decide: str | None = None, refused: Refusal | None = None, warm: bool = False
) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        STEPS.append(ConstructedStep(build, decide, refused, warm))
        return build

    return add


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def gradient_of(held: Tensor) -> Tensor:
    assert held.grad is not None
    return held.grad


def loss_of(found: Tensor) -> Tensor:
    return found.sin().square().mean()


def plain(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        return loss

    return step


class Counting(Optimizer):
    """Counts in Python, in its groups and for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "beta": 0.9, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for held in group["params"]:
                state = self.state[held]
                if not state:
                    state["taken"], state["average"] = 0, torch.zeros_like(held)
                state["taken"] += 1
                state["average"].mul_(group["beta"]).add_(held.grad, alpha=1 - group["beta"])
                held.sub_(
                    state["average"] / (1 - group["beta"] ** state["taken"]), alpha=group["lr"] / group["k"]
                )


@step()
def counts_in_python() -> Training:
    model = network()
    optimizer = Counting(model.parameters())
    return Training(model, optimizer, plain(model, optimizer))


@step()
def returns_a_number() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    inner = plain(model, optimizer)
    return Training(model, optimizer, lambda x: inner(x).item())


@step()
def returns_numbers() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        found = model(x)
        loss = loss_of(found)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return {"loss": loss.item(), "norm": norm.item(), "found": found.detach(), "size": len(x)}

    return Training(model, optimizer, step)


@step(decide="example")
def rectified() -> Training:
    model = network()
    optimizer = torch.optim.RAdam(model.parameters())
    return Training(model, optimizer, plain(model, optimizer))


@step(warm=True, decide="example")
def averaged_descent() -> Training:
    model = network()
    optimizer = torch.optim.ASGD(model.parameters())
    return Training(model, optimizer, plain(model, optimizer))


@step()
def factored() -> Training:
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters())
    return Training(model, optimizer, plain(model, optimizer))


REQUIRED = Refusal(
    whence.UnsupportedStep, r"turns requires_grad of args\[0\]", "the caller's tensor would hold a gradient"
)


@step()
def schedule_outside() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    schedule = CosineAnnealingLR(optimizer, 5)
    return Training(model, optimizer, plain(model, optimizer), schedule.step)


@step()
def cycles_betas_outside() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    return Training(model, optimizer, plain(model, optimizer), schedule.step)


@step()
def rate_set_inside() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    inner = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return loss

    return Training(model, optimizer, step)


@step()
def zeroes_in_place() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@step(warm=True)
def zeroes_in_place_from_then_on() -> Training:
    return zeroes_in_place()


@step()
def zeroes_at_the_end() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return Training(model, optimizer, step)


@step()
def accumulates_over_calls() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        return loss

    return Training(model, optimizer, step)


@step()
def attacks_by_sign() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss_of(model(x)).backward()
        attacked = (x + 0.1 * gradient_of(x).sign()).detach()
        optimizer.zero_grad()
        loss = loss_of(model(attacked))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@step(refused=REQUIRED)
def attacks_the_argument() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        x.requires_grad = True
        loss_of(model(x)).backward()
        attacked = (x + 0.1 * gradient_of(x).sign()).detach()
        optimizer.zero_grad()
        loss = loss_of(model(attacked))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@step()
def attacks_several_times() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            loss_of(model(x + delta)).backward()
            delta.data = (delta + 0.05 * gradient_of(delta).sign()).clamp(-0.1, 0.1)
            gradient_of(delta).zero_()
        optimizer.zero_grad()
        loss = loss_of(model(x + delta.detach()))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)
