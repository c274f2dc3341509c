"""Values outside of tensors that a step or its model reads, and that somebody changes between two calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

Read = Callable[[Any], Any]
Change = Callable[[int], Any]
SAME = ""
"""Where nothing is refused: each call is eager's."""


@dataclass
class Scene:
    """A step with its model and optimizer, and what is done before each call, which has a number."""

    model: nn.Module
    optimizer: Any
    step: Callable[[Tensor], Any]
    change: Change


@dataclass(frozen=True)
class Row:
    """What is built, and what the refusal names; decided by the example where it `decides`."""

    name: str
    make: Callable[[], Scene]
    refused: str
    decides: bool = False


ROWS: list[Row] = []


def row(refused: str, *, decides: bool = False) -> Callable[[Callable[[], Scene]], Callable[[], Scene]]:
    def add(make: Callable[[], Scene]) -> Callable[[], Scene]:
        ROWS.append(Row(make.__name__, make, refused, decides))
        return make

    return add


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def scene(read: Read, change: Change, model: nn.Module | None = None, optimizer: Any = None) -> Scene:
    """A step whose loss goes through `read`."""
    model = network() if model is None else model
    made = SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer

    def step(x: Tensor) -> Tensor:
        made.zero_grad()
        loss: Tensor = read(model(x).sin().mean())
        loss.backward()
        made.step()
        return loss

    return Scene(model, made, step, change)


class Reading(nn.Module):
    """Computes with what it holds."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 2)
        self.run = run
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.linear(x))


def in_model(run: Callable[[Any, Tensor], Tensor], change: Callable[[Any, int], Any], **held: Any) -> Scene:
    """A model that reads, in a step that does not."""
    model = Reading(run, **held)
    return scene(lambda loss: loss, partial(change, model), model)


def other_optimizer(**options: Any) -> SGD:
    return SGD([nn.Parameter(torch.ones(2))], lr=1.0, **options)


class Box:
    """An object with a number."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value


# --- optimizers, schedules, scalers ----------------------------------------------------------------------


@row("lr")
def a_rate_of_another_optimizer() -> Scene:
    other = other_optimizer()
    return scene(
        lambda loss: loss * other.param_groups[0]["lr"],
        lambda number: other.param_groups[0].update(lr=1.0 / (1 + number)),
    )


@row("momentum")
def a_momentum_of_one_that_an_object_holds() -> Scene:
    box: Any = Box()
    box.other = other_optimizer(momentum=0.9)
    return scene(
        lambda loss: loss * box.other.param_groups[0]["momentum"],
        lambda number: box.other.param_groups[0].update(momentum=0.9 - number / 10),
    )


@row("param_groups")
def groups_of_another_optimizer() -> Scene:
    other = other_optimizer()
    return scene(
        lambda loss: loss * len(other.param_groups),
        lambda number: other.add_param_group({"params": [nn.Parameter(torch.ones(1))]}) if number else None,
    )


@row("lr")
def a_rate_that_a_model_reads() -> Scene:
    return in_model(
        lambda self, y: y * self.other.param_groups[0]["lr"],
        lambda model, number: model.other.param_groups[0].update(lr=1.0 / (1 + number)),
        other=other_optimizer(),
    )


@row(SAME)
def the_rate_of_the_captured_one() -> Scene:
    model = network()
    own = SGD(model.parameters(), lr=0.1)
    return scene(
        lambda loss: loss * own.param_groups[0]["lr"],
        lambda number: own.param_groups[0].update(lr=0.1 / (1 + number)),
        model,
        own,
    )


@row("defaults")
def defaults_of_the_captured_one() -> Scene:
    model = network()
    own = SGD(model.parameters(), lr=0.1)
    return scene(
        lambda loss: loss * own.defaults["lr"],
        lambda number: own.defaults.update(lr=0.1 + number),
        model,
        own,
    )


class Kind(Enum):
    """How a step is scaled."""

    PLAIN = 1
    DOUBLE = 2


class Scaled(SGD):
    """An optimizer of a user's, which reads itself, its class, and marks on parameters."""

    factor = 1.0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.box, self.kind, self.names = Box(), Kind.PLAIN, {1}
        self.function: Read = torch.clone

    @property
    def outside(self) -> float:
        return OUTSIDE.value

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        scale = self.factor * self.box.value * self.kind.value * len(self.names) * self.outside
        for group in self.param_groups:
            for held in group["params"]:
                rate = group["lr"] * scale * getattr(held, "rate", 1.0)
                held.data.add_(self.function(held.grad), alpha=-rate)


OUTSIDE = Box()


def of_optimizer(change: Callable[[Scaled, int], Any]) -> Scene:
    model = network()
    own = Scaled(model.parameters())
    return scene(lambda loss: loss, partial(change, own), model, own)


OF_OPTIMIZER: dict[str, tuple[Callable[[Scaled, int], Any], str]] = {
    "its_object": (lambda own, number: setattr(own.box, "value", 1.0 + number), "box.value"),
    "its_kind": (lambda own, number: setattr(own, "kind", Kind.DOUBLE) if number else None, "kind"),
    "its_set": (lambda own, number: own.names.add(number + 1), "names"),
    "its_function": (lambda own, number: setattr(own, "function", torch.abs) if number else None, "function"),
    "a_mark_on_a_parameter": (
        lambda own, number: setattr(own.param_groups[0]["params"][0], "rate", 1.0 + number) if number else 0,
        "rate",
    ),
}
ROWS += [
    Row(f"optimizer_reads_{name}", partial(of_optimizer, change), refused)
    for name, (change, refused) in OF_OPTIMIZER.items()
]


@row(SAME)
def a_last_rate_of_a_schedule() -> Scene:
    model = network()
    own = SGD(model.parameters(), lr=0.1)
    schedule = ExponentialLR(own, 0.5)
    return scene(
        lambda loss: loss * schedule.get_last_lr()[0] * schedule.gamma,
        lambda number: schedule.step() if number else None,
        model,
        own,
    )


@row("base_lrs")
def the_base_rates_of_a_schedule() -> Scene:
    schedule = ExponentialLR(other_optimizer(), 0.5)
    return scene(
        lambda loss: loss * schedule.base_lrs[0],
        lambda number: schedule.base_lrs.__setitem__(0, 1.0 + number),
    )


@row("milestones")
def the_milestones_of_a_schedule() -> Scene:
    schedule: Any = MultiStepLR(other_optimizer(), [2, 3])
    return scene(
        lambda loss: loss * len(schedule.milestones),
        lambda number: schedule.milestones.update([number + 10] if number else []),
    )


def scaling(change: Callable[[GradScaler, int], Any]) -> Scene:
    model = network()
    own = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step(x: Tensor) -> Tensor:
        own.zero_grad()
        loss: Tensor = model(x).sin().mean()
        scaler.scale(loss).backward()
        scaler.step(own)
        scaler.update()
        return scaler.scale(loss.detach())

    return Scene(model, own, step, partial(change, scaler))


def loaded(scaler: GradScaler, **entries: Any) -> None:
    scaler.load_state_dict({**scaler.state_dict(), **entries})


SCALERS: dict[str, tuple[Callable[[GradScaler, int], Any], str]] = {
    "a_new_scale": (lambda scaler, number: scaler.update(new_scale=3.0 + number) if number else None, SAME),
    "a_loaded_scale": (lambda scaler, number: loaded(scaler, scale=7.0 + number), SAME),
    "a_loaded_growth": (lambda scaler, number: loaded(scaler, growth_factor=2.0 + number), "growth"),
    "a_backoff": (lambda scaler, number: scaler.set_backoff_factor(0.5 / (1 + number)), "backoff"),
}
ROWS += [
    Row(f"scaler_has_{name}", partial(scaling, change), refused, decides=True)
    for name, (change, refused) in SCALERS.items()
]


@row("enabled")
def whether_a_scaler_is_enabled() -> Scene:
    scaler = GradScaler("cpu", enabled=False)
    return scene(
        lambda loss: loss * (2.0 if scaler.is_enabled() else 1.0),
        lambda number: setattr(scaler, "_enabled", number > 2),
    )


# --- data sets and samplers ------------------------------------------------------------------------------


def data(rows: int = 4) -> TensorDataset:
    return TensorDataset(torch.zeros(rows, 2))


def of_length(held: Any, change: Change) -> Scene:
    return scene(lambda loss: loss / len(held), change)


@row("tensors")
def a_length_of_a_data_set() -> Scene:
    held = data()
    return of_length(held, lambda number: setattr(held, "tensors", (torch.zeros(4 + number, 2),)))


@row("indices")
def a_length_of_a_subset() -> Scene:
    held = Subset(data(), [0, 1])
    return of_length(held, lambda number: held.indices.append(1) if number else None)  # type: ignore[attr-defined]


@row("cumulative_sizes")
def a_length_of_several() -> Scene:
    held: Any = ConcatDataset([data(), data()])
    return of_length(held, lambda number: held.cumulative_sizes.__setitem__(-1, 8 + number))


@row("data_source")
def a_length_of_a_loader() -> Scene:
    rows = [1, 2, 3]
    return of_length(DataLoader(rows), lambda number: rows.append(4) if number else None)  # type: ignore[arg-type]


@row("batch_size")
def a_length_of_a_batch_sampler() -> Scene:
    held = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    return of_length(held, lambda number: setattr(held, "batch_size", 2 + number))


@row("num_samples")
def a_number_of_samples() -> Scene:
    sampler = RandomSampler(range(9), replacement=True, num_samples=5)
    return scene(
        lambda loss: loss / sampler.num_samples, lambda number: setattr(sampler, "_num_samples", 5 + number)
    )


@row("indices")
def a_length_that_a_model_reads() -> Scene:
    return in_model(
        lambda self, y: y / len(self.data),
        lambda model, number: model.data.indices.append(1) if number else None,
        data=Subset(data(), [0, 1]),
    )


DATA = data()


@row("tensors")
def a_length_of_a_global_data_set() -> Scene:
    DATA.tensors = (torch.zeros(4, 2),)
    return in_model(
        lambda _, y: y / len(DATA), lambda _, number: setattr(DATA, "tensors", (torch.zeros(4 + number, 2),))
    )
