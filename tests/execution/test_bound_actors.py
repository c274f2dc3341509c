"""A bound step runs what it called at capture, and says where it would call something else now."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import whence

X = torch.randn(2, 4)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """In the place of a method."""


def _shadow(name: str) -> Callable[[Any, Any], None]:
    return lambda optimizer, patch: patch.setattr(optimizer, name, _nothing, raising=False)


def _stepping() -> tuple[nn.Module, torch.optim.SGD, Callable[[Tensor], Tensor]]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


REPLACED: dict[str, tuple[str, Callable[[Any, Any], None]]] = {
    "step": ("SGD.step", _shadow("step")),
    "zero_grad": ("SGD.zero_grad", _shadow("zero_grad")),
    "a method that its step calls": ("SGD._init_group", _shadow("_init_group")),
    "step of the class": ("SGD.step", lambda _, patch: patch.setattr(torch.optim.SGD, "step", _nothing)),
    "zero_grad of all": (
        "SGD.zero_grad",
        lambda _, patch: patch.setattr(torch.optim.Optimizer, "zero_grad", _nothing),
    ),
}


@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("is_bound", [False, True], ids=["before bind", "bound"])
def test_method_of_the_optimizer_that_was_replaced(
    what: str, is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check names it, and no run is another one than eager's: the model stays as it was."""
    name, replace = REPLACED[what]
    model, optimizer, step = _stepping()
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    bound = program.bind(model, optimizer) if is_bound else None
    before = [tensor.clone() for tensor in model.parameters()]
    replace(optimizer, monkeypatch)
    assert [violation.guard.what for violation in program.check(model, (X,))] == [name]
    with pytest.raises(whence.StaleCapture, match=f"`{name}` was a function at capture"):
        (bound or program.bind(model, optimizer))(X)
    assert all(map(torch.equal, before, model.parameters()))


def test_schedule_that_is_made_after_the_capture() -> None:
    """What it puts around the step of the optimizer counts, and changes nothing: that is the same step."""
    model, optimizer, step = _stepping()
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    schedule = StepLR(optimizer, 1)
    assert program.check(model, (X,)) == []
    program.bind(model, optimizer)(X)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
