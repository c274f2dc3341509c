"""Training steps that work in hooks on parameters, while the backward runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.hooks import RemovableHandle

import whence
from tests.behaviours.constructed_steps import STEPS, Training, gradient_of, loss_of, network, plain, step
from tests.behaviours.constructions import Refusal

__all__ = ["STEPS"]

REMOVED = Refusal(
    whence.UnsupportedStep, "changes the gradient hooks of 0.weight", "the next step would not run it"
)
Hook = Callable[[Any], Any]


def after_each(model: nn.Module, hook: Hook) -> list[RemovableHandle]:
    return [held.register_post_accumulate_grad_hook(hook) for held in model.parameters()]


def backward_only(model: nn.Module, parts: int = 1) -> Callable[[Tensor], Tensor]:
    """A step without an optimizer: that is stepped by hooks."""

    def step(x: Tensor) -> Tensor:
        for part in x.chunk(parts):
            loss = loss_of(model(part))
            loss.backward()
        return loss

    return step


def in_backward(make: Callable[[Any], Optimizer], *, parts: int = 1, schedules: bool = False) -> Training:
    """PyTorch's tutorial on optimizers in the backward: one for each parameter."""
    model = network()
    optimizers = {held: make([held]) for held in model.parameters()}
    moved = {held: ExponentialLR(each, 0.9) for held, each in optimizers.items() if schedules}

    def hook(held: Tensor) -> None:
        optimizers[held].step()  # type: ignore[index]
        optimizers[held].zero_grad()  # type: ignore[index]
        if schedules:
            moved[held].step()  # type: ignore[index]

    after_each(model, hook)
    return Training(model, [*optimizers.values()], backward_only(model, parts))


@step()
def optimizers_in_the_backward() -> Training:
    return in_backward(AdamW)


@step(warm=True)
def optimizers_in_two_backwards() -> Training:
    return in_backward(lambda held: Adam(held, foreach=False), parts=2)


@step()
def schedules_in_the_backward() -> Training:
    return in_backward(lambda held: SGD(held, lr=0.1), schedules=True)


@step()
def descends_in_the_backward() -> Training:
    """LOMO's way: every gradient that has arrived is used up when the next one does."""
    model = network()

    def hook(_: Any) -> None:
        with torch.no_grad():
            for held in model.parameters():
                if held.grad is not None:
                    held.data.add_(held.grad, alpha=-0.1)
                    held.grad = None

    for held in model.parameters():
        held.register_hook(hook)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        hook(None)
        return loss

    return Training(model, None, step)


def trained(hook: Callable[[SimpleNamespace, nn.Parameter], Hook], **held: Any) -> Training:
    """A plain step of a model with a hook on every gradient before it arrives."""
    model, kept = network(), SimpleNamespace(**held)
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.register_hook(hook(kept, parameter))
    return Training(model, optimizer, plain(model, optimizer), kept=lambda: vars(kept))


@step()
def gradients_scaled_by_hooks() -> Training:
    return trained(lambda kept, _: lambda gradient: gradient * kept.by, by=0.5)


@step()
def gradients_written_by_hooks() -> Training:
    def hook(gradient: Tensor) -> None:
        gradient.add_(torch.randn_like(gradient), alpha=0.1)

    return trained(lambda *_: hook)


@step()
def gradients_masked_by_hooks() -> Training:
    def masked(_: Any, parameter: nn.Parameter) -> Hook:
        mask = (parameter > 0).float().detach()
        return lambda gradient: gradient * mask

    return trained(masked)


@step()
def norms_collected_by_hooks() -> Training:
    def collecting(kept: Any, _: Any) -> Hook:
        def hook(gradient: Tensor) -> None:
            kept.norms.append(gradient.norm())
            kept.taken += 1

        return hook

    return trained(collecting, norms=[], taken=0)


@step(decide="example")
def clips_in_hooks_where_needed() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)

    def hook(held: Tensor) -> None:
        if (norm := gradient_of(held).norm()) > 1e-6:
            gradient_of(held).mul_(1e-6 / norm)

    after_each(model, hook)
    return Training(model, optimizer, plain(model, optimizer))


@step(refused=REMOVED)
def a_hook_that_takes_itself_away() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    handles: list[RemovableHandle] = []

    def hook(_: Tensor) -> None:
        while handles:
            handles.pop().remove()

    handles += after_each(model, hook)[:1]
    return Training(model, optimizer, plain(model, optimizer))
