"""Two models that are one bit for bit: one is trained by eager PyTorch, one by a captured step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import whence
from tests.checks import differing
from tests.models import ModelCase
from whence.program.arguments.optimizer_arguments import state_parts

Make = Callable[[nn.Module], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "sgd_decay": lambda model: SGD(model.parameters(), lr=0.1, weight_decay=0.05, maximize=True),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda model: Adam(model.parameters(), lr=0.01, weight_decay=0.1),
    "amsgrad": lambda model: Adam(model.parameters(), lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "adamw_tensor_lr": lambda model: AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "adamw_foreach": lambda model: AdamW(model.parameters(), lr=0.01, foreach=True),
    "adamw_fused": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
    "momentum_foreach": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "momentum_fused": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, lr_decay=0.1),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "nadam": lambda model: torch.optim.NAdam(model.parameters()),
}
BEGINS_WITH_GRADIENTS = frozenset({"momentum", "nesterov", "momentum_foreach", "momentum_fused"})


@dataclass
class Twin:
    """A model, its optimizer, and one step of training."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[..., Any]

    def everything(self) -> dict[str, Any]:
        """A copy of all that a step may change, by name."""
        names = {id(held): name for name, held in self.model.named_parameters()}
        found: dict[str, Any] = {
            f"state {name}": tensor.detach().clone()
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
        }
        found |= {
            f"gradient {name}": None if held.grad is None else held.grad.clone()
            for name, held in self.model.named_parameters()
        }
        for held, piece in self.optimizer.state.items():
            of = names.get(id(held), held)
            leaves = ((part.spelled, part.value) for part in state_parts(piece) if not part.is_entered)
            found |= {
                f"optimizer {of}{spelled}": value.clone() if isinstance(value, Tensor) else value
                for spelled, value in leaves
            }
        return found


def training(model: nn.Module, optimizer: Optimizer, loss: Callable[[Any], Tensor]) -> Callable[..., Tensor]:
    """The loop body that everybody writes."""

    def step(*args: Any, **kwargs: Any) -> Tensor:
        optimizer.zero_grad()
        value = loss(model(*args, **kwargs))
        value.backward()
        optimizer.step()
        return value

    return step


def twin(row: ModelCase, make: Make, *, warm: bool = False) -> Twin:
    """The same bits at every call; where `warm`, after one step of eager's."""
    model, args, kwargs = row.make()
    optimizer = make(model)
    made = Twin(model, optimizer, training(model, optimizer, row.loss))
    if warm:
        made.step(*args, **kwargs)
    return made


def trained_alike(row: ModelCase, name: str, *, steps: int = 3) -> whence.Program:
    """The program of a step of this case; asserts that it trains as eager does, bit for bit."""
    return trained_alike_by(row, OPTIMIZERS[name], warm=name in BEGINS_WITH_GRADIENTS, steps=steps)


def trained_alike_by(row: ModelCase, make: Make, *, warm: bool = False, steps: int = 3) -> whence.Program:
    """The same with an optimizer that is in no table; where `warm`, after one step of eager's."""
    ours, eager = (twin(row, make, warm=warm) for _ in range(2))
    _, args, kwargs = row.make()
    before = ours.everything()
    program = whence.capture_step(ours.step, args, kwargs, model=ours.model, optimizer=ours.optimizer)
    assert differing(before, ours.everything()) == []
    bound = program.bind(ours.model, ours.optimizer)
    for number in range(steps):
        found = [_once(row, run, number) for run in (bound, eager.step)]
        assert differing(*found) == [], number
        assert differing(eager.everything(), ours.everything()) == [], number
    return program


def _once(row: ModelCase, run: Callable[..., Any], number: int) -> dict[str, Any]:
    torch.manual_seed(number)
    args, kwargs = row.inputs()
    loss = run(*args, **kwargs)
    leaves = {f"argument {at}": value for at, value in enumerate((*args, *kwargs.values()))}
    changed = {name: value.detach().clone() for name, value in leaves.items() if isinstance(value, Tensor)}
    return {"loss": loss.detach(), "generator": torch.get_rng_state(), **changed}
