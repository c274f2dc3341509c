"""Training steps as people write them, each over a small model."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import whence
from tests.behaviours.constructions import Refusal, numbers


@dataclass
class Training:
    """A model with its optimizer and a step; `between` is what the loop around the step does after each.

    Of a `warm` one the first step is eager's.
    """

    model: nn.Module
    optimizer: Any
    step: Callable[..., Any]
    between: Callable[[], Any] = lambda: None
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


KEEPS = "a program changes tensors and nothing else of what the step holds"
SCHEDULED = Refusal(whence.UnsupportedStep, "changes schedule.last_epoch", KEEPS)
ADDED = Refusal(whence.StaleCapture, "had none", "the capture had no gradient to add to", of_run=True)
REQUIRED = Refusal(
    whence.StaleCapture, "requires grad", "the argument is another one once it was captured", of_run=True
)
ANOTHER = Refusal(whence.UnsupportedStep, "was not given", "it holds an optimizer of its own")
SEVERAL = Refusal(whence.UsageError, "the optimizer is a list", "a step is captured with one optimizer")
SCALED = Refusal(whence.DataDependent, "GradScaler", "whether gradients are finite is a decision by value")
UNDECIDED = Refusal(
    whence.DataDependent, 'decide="example"', "whether it is the first average is a tensor's value"
)
LISTED = Refusal(whence.UnsupportedStep, "is a list", "its state holds lists of tensors that grow")
DRAWN = Refusal(whence.SideEffect, "draws from", "the number would be a constant")


@step(refused=Refusal(whence.UnsupportedStep, "changes losses", KEEPS))
def appends_losses() -> Training:
    model, losses = network(), list[Tensor]()
    optimizer = AdamW(model.parameters())
    inner = plain(model, optimizer)
    return Training(model, optimizer, lambda x: losses.append(inner(x).detach()))


class Trainer:
    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.run, self.global_step = plain(model, optimizer), 0

    def training_step(self, x: Tensor) -> Tensor:
        self.global_step += 1
        return self.run(x)


@step(refused=Refusal(whence.UnsupportedStep, "changes Trainer.global_step", KEEPS))
def counts_in_a_trainer() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    return Training(model, optimizer, Trainer(model, optimizer).training_step)


@step()
def schedule_outside() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    schedule = CosineAnnealingLR(optimizer, 5)
    return Training(model, optimizer, plain(model, optimizer), schedule.step)


@step(warm=True, refused=SCHEDULED)
def schedule_inside() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    schedule, inner = ExponentialLR(optimizer, 0.9), plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        schedule.step()
        return loss

    return Training(model, optimizer, step)


@step(warm=True, refused=SCHEDULED)
def warmup_inside() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda at: min(1.0, at / 3))
    inner = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        schedule.step()
        return loss

    return Training(model, optimizer, step)


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


@step(refused=ADDED)
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


@step(refused=ADDED)
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


@step(refused=ADDED)
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


def pair() -> nn.ModuleDict:
    return nn.ModuleDict({"maker": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})


@step(refused=SEVERAL)
def two_optimizers() -> Training:
    models = pair()
    first, second = Adam(models["maker"].parameters()), Adam(models["critic"].parameters())

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn_like(x)
        second.zero_grad()
        made = models["maker"](noise)
        judged = F.softplus(-models["critic"](x)).mean() + F.softplus(models["critic"](made.detach())).mean()
        judged.backward()
        second.step()
        first.zero_grad()
        fooled = F.softplus(-models["critic"](made)).mean()
        fooled.backward()
        first.step()
        return judged.detach(), fooled.detach()

    return Training(models, [first, second], step)


@step()
def two_models_one_optimizer() -> Training:
    models = pair()
    optimizer = Adam(models.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        policy, value = models["maker"](x).log_softmax(-1), models["critic"](x)
        action = torch.multinomial(policy.exp(), 1)
        advantage = x.sum(1, keepdim=True) - value
        loss = -(policy.gather(1, action) * advantage.detach()).mean() + advantage.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(models, optimizer, step)


@step()
def two_halves_of_an_adversarial_game() -> Training:
    models = pair()
    optimizer = Adam(models["critic"].parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        made = models["maker"](torch.randn_like(x)).detach()
        mixed = (made * 0.3 + x * 0.7).requires_grad_()
        judged = models["critic"](mixed)
        (slope,) = torch.autograd.grad(judged.sum(), mixed, create_graph=True)
        loss = (
            models["critic"](made).mean()
            - models["critic"](x).mean()
            + (slope.norm(dim=1) - 1).square().mean()
        )
        loss.backward()
        optimizer.step()
        return loss

    return Training(models, optimizer, step)


class Sharpness(Optimizer):
    """SAM as its best known implementation writes it."""

    def __init__(self, parameters: Any, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.norm(torch.stack([p.grad.norm() for p in held]))
        for p in held:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base.step()


@step(warm=True, refused=ANOTHER)
def sharpness_aware() -> Training:
    model = network()
    optimizer = Sharpness(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        optimizer.first_step()
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.second_step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, step)


@step()
def sharpness_by_hand() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        with torch.no_grad():
            moved = [gradient_of(held) * 0.05 for held in model.parameters()]
            for held, by in zip(model.parameters(), moved, strict=True):
                held.add_(by)
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        with torch.no_grad():
            for held, by in zip(model.parameters(), moved, strict=True):
                held.sub_(by)
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@step(warm=True, decide="example")
def scales_gradients() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x).float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Training(model, optimizer, step)


@step(warm=True, decide="example")
def scales_and_clips() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(x: Tensor) -> tuple[Tensor, float]:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss, scaler.get_scale()

    return Training(model, optimizer, step)


@step(refused=SCALED, warm=True)
def scales_undecided() -> Training:
    return scales_gradients()


@step()
def scaler_that_is_off() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Training(model, optimizer, step)


def with_average() -> nn.ModuleDict:
    model = network()
    return nn.ModuleDict({"model": model, "average": copy.deepcopy(model).requires_grad_(False)})


@step()
def average_by_data() -> Training:
    models = with_average()
    optimizer = AdamW(models["model"].parameters())
    inner = plain(models["model"], optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        for averaged, held in zip(models["average"].parameters(), models["model"].parameters(), strict=True):
            averaged.data = 0.9 * averaged.data + 0.1 * held.data
        return loss

    return Training(models, optimizer, step)


@step()
def average_in_place() -> Training:
    models = with_average()
    optimizer = AdamW(models["model"].parameters())
    inner = plain(models["model"], optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        for averaged, held in zip(models["average"].parameters(), models["model"].parameters(), strict=True):
            averaged.data.mul_(0.9).add_(held.data, alpha=0.1)
        return loss

    return Training(models, optimizer, step)


@step()
def average_of_state_dicts() -> Training:
    models = with_average()
    optimizer = AdamW(models["model"].parameters())
    inner = plain(models["model"], optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        now, mean = models["model"].state_dict(), models["average"].state_dict()
        for name, held in mean.items():
            held.copy_(held * 0.9 + now[name] * 0.1)
        return loss

    return Training(models, optimizer, step)


@step(warm=True, refused=UNDECIDED)
def averaged_model() -> Training:
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    models = nn.ModuleDict({"model": model, "average": average})
    optimizer = AdamW(model.parameters())
    inner = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        average.update_parameters(model)
        return loss

    return Training(models, optimizer, step)


@step(warm=True, decide="example")
def averaged_model_that_decides() -> Training:
    return averaged_model()


@step(warm=True, decide="example")
def stochastic_weight_average() -> Training:
    model = network()
    average = AveragedModel(model)
    models = nn.ModuleDict({"model": model, "average": average})
    optimizer = AdamW(model.parameters())
    inner = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        average.update_parameters(model)
        return loss

    return Training(models, optimizer, step)


@step()
def closure_of_sgd() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Training(model, optimizer, step)


@step()
def closure_of_adam() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Training(model, optimizer, step)


def lbfgs(**options: Any) -> Training:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, **options)

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Training(model, optimizer, step)


@step(warm=True, decide="example", refused=LISTED)
def quasi_newton() -> Training:
    return lbfgs()


@step()
def adjacency_in_a_step() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    adjacency = torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]), torch.ones(5), (5, 5), check_invariants=True
    ).coalesce()

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(torch.sparse.mm(adjacency, model(x)))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


class Momentous(nn.Module):
    """Replaces the data of its own buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.mean.data = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return hidden - self.mean


@step()
def data_replaced_inside() -> Training:
    model = Momentous()
    optimizer = AdamW(model.parameters())
    return Training(model, optimizer, plain(model, optimizer))


@step()
def data_of_weights_clamped() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    inner = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        for held in model.parameters():
            held.data.clamp_(-0.2, 0.2)
        return loss

    return Training(model, optimizer, step)


@step()
def data_of_weights_replaced() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    inner = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        for held in model.parameters():
            held.data = held.data.clamp(-0.2, 0.2)
        return loss

    return Training(model, optimizer, step)


@step()
def microbatches_under_autocast() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for part in x.split(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model(part).float()) / 3
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses).sum()

    return Training(model, optimizer, step)


@step()
def gradients_by_autograd_grad() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        held = list(model.parameters())
        for parameter, gradient in zip(held, torch.autograd.grad(loss, held), strict=True):
            parameter.grad = gradient + 0.01 * parameter.detach()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@step()
def noise_on_gradients() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = gradient_of(parameter).add_(torch.randn_like(parameter), alpha=0.01)
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@step()
def frozen_for_a_while() -> Training:
    models = pair()
    optimizer = Adam(models["maker"].parameters())

    def step(x: Tensor) -> Tensor:
        models["critic"].requires_grad_(False)
        optimizer.zero_grad()
        loss = loss_of(models["critic"](models["maker"](x)))
        loss.backward()
        optimizer.step()
        models["critic"].requires_grad_(True)
        return loss

    return Training(models, optimizer, step)


@step()
def evaluates_on_the_way() -> Training:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        model.train()
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            after = loss_of(model(x))
        model.train()
        return loss, after

    return Training(model, optimizer, step)


@step(decide="example")
def skips_bad_steps() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        if not torch.isfinite(loss):
            return loss
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@step(decide="example")
def clips_where_needed() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        norm = torch.stack([gradient_of(held).norm() for held in model.parameters()]).norm()
        if norm > 1e-3:
            for held in model.parameters():
                gradient_of(held).mul_(1e-3 / norm)
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


@step(decide="example")
def augments_by_a_coin() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    inner = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        if torch.rand(()) < 0.95:
            x = x + torch.randn_like(x) * 0.1
        return inner(x)

    return Training(model, optimizer, step)


@step(decide="example")
def augments_by_a_coin_of_python() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    inner = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        if random.random() < 0.97:
            x = x.flip(1)
        return inner(x)

    return Training(model, optimizer, step)


@step(decide="example")
def mixes_by_numpy() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    inner = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        if np.random.rand() < 0.95:
            x = 0.7 * x + 0.3 * x.flip(0)
        return inner(x)

    return Training(model, optimizer, step)


@step()
def distils_a_teacher() -> Training:
    models = with_average()
    optimizer = AdamW(models["model"].parameters())

    def step(x: Tensor) -> Tensor:
        models["average"].eval()
        with torch.inference_mode(False), torch.no_grad():
            wanted = models["average"](x).softmax(-1)
        optimizer.zero_grad()
        loss = F.kl_div(models["model"](x).log_softmax(-1), wanted, reduction="batchmean")
        loss.backward()
        optimizer.step()
        return loss

    return Training(models, optimizer, step)
