"""`torch.compile` beside a bound step, and around it."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import whence

X = torch.ones(2, 4)
NAMES = ((SGD, "_init_group"), (sys.modules[SGD.__module__], "_fused_sgd"))


def stepping() -> tuple[nn.Module, SGD, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), 0.1, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def leave_unread(patch: pytest.MonkeyPatch) -> None:
    """As the compiler does with functions of PyTorch's optimizers when it is first used."""
    for owner, name in NAMES:
        written = inspect.unwrap(vars(owner)[name])
        patch.setattr(owner, name, torch.compiler.disable(written, reason="not supported"))


def leave_as_written(patch: pytest.MonkeyPatch) -> None:
    """As before that."""
    for owner, name in NAMES:
        patch.setattr(owner, name, inspect.unwrap(vars(owner)[name]))


@pytest.mark.parametrize("orders", [(leave_as_written, leave_unread), (leave_unread, leave_as_written)])
def test_the_compiler_is_used_for_the_first_time(
    orders: tuple[Callable[[Any], None], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps it from reading the optimizers is no other optimizer, before the capture or after it."""
    before, after = orders
    model, optimizer, step = stepping()
    before(monkeypatch)
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    run(X)
    after(monkeypatch)
    assert list(map(str, program.check(model, (X,)))) == []
    run(X)
