"""Training steps of several models with several optimizers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR

import whence
from tests.behaviours.constructed_steps import STEPS, Counting, Training, loss_of, step
from tests.behaviours.constructions import Refusal

__all__ = ["STEPS"]


def game(models: Any, optimizers: Any, *, with_schedule: bool = False) -> Training:
    """A generative adversarial network; its models and optimizers in a row, or by name."""
    maker, critic = models.values() if isinstance(models, dict) else models
    ours, theirs = optimizers.values() if isinstance(optimizers, dict) else optimizers
    schedule = ExponentialLR(theirs, 0.5)
    losses = list[tuple[float, float]]()

    def step(x: Tensor) -> Tensor:
        made = maker(torch.randn_like(x))
        theirs.zero_grad()
        judged = F.softplus(-critic(x)).mean() + F.softplus(critic(made.detach())).mean()
        judged.backward()
        theirs.step()
        if with_schedule:
            schedule.step()
        ours.zero_grad()
        fooled = F.softplus(-critic(made)).mean()
        fooled.backward()
        ours.step()
        losses.append((judged.item(), fooled.item()))
        return judged.detach() + fooled.detach()

    return Training(models, optimizers, step, kept=lambda: losses)


def two() -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)


@step()
def game_in_a_row() -> Training:
    models = two()
    return game(models, [Adam(model.parameters()) for model in models])


@step(warm=True)
def game_by_name() -> Training:
    maker, critic = two()
    optimizers = {"g": AdamW(maker.parameters()), "d": SGD(critic.parameters(), lr=0.1, momentum=0.9)}
    return game({"g": maker, "d": critic}, optimizers)


@step()
def game_with_a_schedule() -> Training:
    models = two()
    return game(
        models, [Adam(models[0].parameters()), SGD(models[1].parameters(), lr=0.1)], with_schedule=True
    )


@step()
def actor_and_critic() -> Training:
    models = {"actor": nn.Linear(4, 3), "critic": nn.Linear(4, 1)}
    optimizers = [Adam(models["actor"].parameters()), Adam(models["critic"].parameters(), lr=0.01)]

    def step(x: Tensor) -> dict[str, Tensor]:
        policy, value = models["actor"](x).log_softmax(-1), models["critic"](x)
        action = torch.multinomial(policy.exp(), 1)
        advantage = x.sum(1, keepdim=True) - value
        losses = {
            "actor": -(policy.gather(1, action) * advantage.detach()).mean(),
            "critic": advantage.square().mean(),
        }
        for optimizer, loss in zip(optimizers, losses.values(), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses

    return Training(models, optimizers, step)


@step()
def encoder_and_decoder_that_count() -> Training:
    models = (nn.Linear(4, 2), nn.Linear(2, 4))
    optimizers = [Counting(models[0].parameters()), AdamW(models[1].parameters())]

    def step(x: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(models[1](models[0](x).tanh()) - x)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return Training(models, optimizers, step)


@step(refused=Refusal(whence.UnsupportedStep, "several optimizers hold", "state of the same name in each"))
def two_optimizers_of_one_model() -> Training:
    model = nn.Linear(4, 4)
    optimizers = [SGD(model.parameters(), lr=0.1), Adam(model.parameters())]

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Training(model, optimizers, step)
