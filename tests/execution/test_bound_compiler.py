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
from tests.checks import differing, state

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


def test_a_bound_step_inside_a_compiled_function() -> None:
    """The compiler reads none of it, and goes on behind it."""
    model, optimizer, step = stepping()
    eager, _, theirs = stepping()
    run = whence.capture_step(step, (X,), model=model, optimizer=optimizer).bind(model, optimizer)
    compiled = torch.compile(lambda x: run(x) * 2, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(X), theirs(X) * 2)
    assert differing(state(eager), state(model)) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("on_violation", ["raise", "recapture"])
def test_a_guarded_program_inside_a_compiled_function(on_violation: Any) -> None:
    """It looks at the model in every call, as outside of one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    guarded = whence.capture(model.eval(), (X,)).guarded(model, on_violation=on_violation)
    compiled = torch.compile(lambda x: guarded(x) * 2, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(X), model(X) * 2)
    model[1] = nn.Tanh()
    if on_violation == "raise":
        with pytest.raises(whence.StaleCapture):
            compiled(X)
    else:
        assert torch.equal(compiled(X), model(X) * 2)
