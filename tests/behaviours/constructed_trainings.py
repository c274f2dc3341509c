"""Training steps of several models, with scalers, averages, closures and coins."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import whence
from tests.behaviours.constructed_steps import STEPS, Training, gradient_of, loss_of, network, plain, step
from tests.behaviours.constructions import Refusal

__all__ = ["STEPS"]

SCALED = Refusal(whence.DataDependent, "GradScaler", "whether gradients are finite is a decision by value")
UNDECIDED = Refusal(
    whence.DataDependent, 'decide="example"', "whether it is the first average is a tensor's value"
)
NEEDED = Refusal(whence.DataDependent, "needs it in Python", "it keeps the loss as a number")


def pair() -> nn.ModuleDict:
    return nn.ModuleDict({"maker": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})


@step()
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


@step()
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


def averaging(average: Callable[[nn.ModuleDict], None]) -> Training:
    """A step of AdamW, and an average of the weights that follows it."""
    models = with_average()
    optimizer = AdamW(models["model"].parameters())
    inner = plain(models["model"], optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        average(models)
        return loss

    return Training(models, optimizer, step)


def weights(models: nn.ModuleDict) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of the average, each with that of the model."""
    return zip(models["average"].parameters(), models["model"].parameters(), strict=True)


@step()
def average_by_data() -> Training:
    def average(models: nn.ModuleDict) -> None:
        for averaged, held in weights(models):
            averaged.data = 0.9 * averaged.data + 0.1 * held.data

    return averaging(average)


@step()
def average_in_place() -> Training:
    def average(models: nn.ModuleDict) -> None:
        for averaged, held in weights(models):
            averaged.data.mul_(0.9).add_(held.data, alpha=0.1)

    return averaging(average)


@step()
def average_of_state_dicts() -> Training:
    def average(models: nn.ModuleDict) -> None:
        now = models["model"].state_dict()
        for name, held in models["average"].state_dict().items():
            held.copy_(held * 0.9 + now[name] * 0.1)

    return averaging(average)


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


@step(warm=True, decide="example", refused=NEEDED)
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


@step(warm=True)
def distils_a_teacher() -> Training:
    """The first step turns the teacher to evaluation, which no later one does."""
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
