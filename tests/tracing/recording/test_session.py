"""Who hears a run knows who else does: afterwards nothing of that holds the model."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence

X = torch.ones(3, 4)


class Deciding(nn.Module):
    """Takes a branch by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        return y if y.sum() > 0 else -y


class Failing(nn.Module):
    """Raises an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(self.lin(x).shape)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.ReLU())


def plain(model: nn.Module) -> Any:
    return whence.capture(model, (X,))


def joint(model: nn.Module) -> Any:
    program = whence.capture(model, (X,), backward=True)
    return program, program.verify(model, (X,))


def of_open_sizes(model: nn.Module) -> Any:
    return whence.capture(model, (X,), dynamic_shapes=({0: Dim("rows")},))


def decided(model: nn.Module) -> Any:
    return whence.capture(nn.Sequential(model, Deciding()), (X,), decide="example")


def called(model: nn.Module) -> Any:
    program = whence.capture(model, (X,))
    return program.guarded(model)(X), program.check(model, (X,)), str(program)


def exported(model: nn.Module) -> Any:
    return whence.capture(model, (X,)).to_exported_program()


def step(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    program = whence.capture_step(train, (X,), model=model, optimizer=optimizer)
    return program.bind(model, optimizer)(X)


def refused(model: nn.Module) -> Any:
    with suppress(whence.CaptureError):
        whence.capture(nn.Sequential(model, Deciding()), (X,))


def failed(model: nn.Module) -> Any:
    with suppress(ValueError):
        whence.capture(nn.Sequential(model, Failing()), (X,))


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.disable()
    logging.disable()  # pytest keeps what is logged, with what it speaks of
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize(
    "use",
    [plain, joint, of_open_sizes, decided, called, exported, step, refused, failed],
    ids=lambda use: use.__name__,
)
def test_a_model_goes_when_nobody_holds_it(use: Callable[[nn.Module], Any]) -> None:
    """Its weights go at once, and not when Python's collector comes by."""
    model = sequential()
    found, weight = use(model), ref(next(model.parameters()))
    del found, model
    assert weight() is None
