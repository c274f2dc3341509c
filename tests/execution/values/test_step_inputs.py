"""`optimizer=` gives a run of a step's graph what the optimizer holds now."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def _trained(kind: Any, *, begun: bool, **options: Any) -> Any:
    """A model, its optimizer, and a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), lr=0.1, **options)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if begun:
        step(X)
    return model, optimizer, step


def _held(optimizer: Any) -> Any:
    return deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(
    ("kind", "options", "begun"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.AdamW, {}, False),
        (torch.optim.AdamW, {"amsgrad": True}, True),
    ],
)
def test_what_an_optimizer_holds_need_not_be_written_down(
    kind: Any, options: dict[str, Any], begun: bool
) -> None:
    """New parameters are those of eager, the learning rate is that of now, and nothing is changed."""
    model, optimizer, step = _trained(kind, begun=begun, **options)
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.025
    before, held = deepcopy(model.state_dict()), str(_held(optimizer))
    outputs = program.run((X,), optimizer=optimizer).outputs
    assert program.first((X,), optimizer=optimizer) is None
    assert program.first((X,), differs_from=program, optimizer=optimizer) is None
    assert str(_held(optimizer)) == held
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step(X)
    rows = [row for row in program.signature.outputs if row.kind == "mutation" and row.path in before]
    assert len(rows) == 4
    assert all(torch.equal(outputs[row.name], model.state_dict()[row.path]) for row in rows)


def test_inputs_take_the_place_of_what_it_holds() -> None:
    """By name or path: here the learning rate."""
    model, optimizer, step = _trained(torch.optim.SGD, begun=False)
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    (rate,) = program.signature.inputs_of(whence.InputKind.OPTIMIZER_STATE)
    outputs = program.run((X,), optimizer=optimizer, inputs={rate.path: 0.0}).outputs
    (row,) = [row for row in program.signature.outputs if row.path == "0.weight" and row.kind == "mutation"]
    assert torch.equal(outputs[row.name], model.state_dict()["0.weight"])


def test_another_optimizer_is_refused() -> None:
    """One of another class, of other tensors, with other constants, or for what is no step."""
    model, optimizer, step = _trained(torch.optim.SGD, begun=True, momentum=0.9)
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    with pytest.raises(whence.UsageError, match="captured with SGD, not Adam"):
        program.run((X,), optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(whence.UsageError, match="do not hold the parameters"):
        program.run((X,), optimizer=_trained(torch.optim.SGD, begun=True, momentum=0.9)[1])
    with pytest.raises(whence.UsageError, match="str is no optimizer"):
        program.run((X,), optimizer="SGD")
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(whence.StaleCapture, match="nesterov"):
        program.first((X,), optimizer=optimizer)
    with pytest.raises(whence.UsageError, match="knows no optimizer"):
        whence.capture(model, (X,)).run((X,), optimizer=optimizer)
