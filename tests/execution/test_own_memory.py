"""Which new values and gradients certainly lie in memory of their own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import whence
from whence.execution.own_memory import certainly_own


class Handing(nn.Module):
    """A buffer that becomes a result, another that becomes an input, and a third that is computed."""

    result: Tensor
    taken: Tensor
    computed: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("result", "taken", "computed"):
            self.register_buffer(name, torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        with torch.no_grad():
            self.result.copy_(y.view(3))
            self.taken.copy_(x)
            self.computed.add_(y)
        return y


def named(program: whence.Program, own: frozenset[str]) -> set[Any]:
    """What such outputs are of."""
    return {row.path for row in program.signature.outputs if row.name in own}


def test_what_an_operator_has_made_is_certainly_own() -> None:
    """What is an input, or seen through a view, is looked at in every run."""
    model = Handing()
    program = whence.capture(model, (torch.ones(3),))
    assert "computed" in named(program, certainly_own(program))
    bound = program.bind(model)
    x = torch.ones(3)
    result = bound(x)
    x.zero_()
    result.zero_()
    assert torch.equal(model.taken, torch.ones(3))
    assert torch.equal(model.result, torch.ones(3).sin())


def test_gradients_that_are_handed_out_are_not() -> None:
    """`.grad` must not change with what the step has returned."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        model(x).sin().sum().backward()
        optimizer.step()
        return model.weight.grad.view(-1)  # type: ignore[union-attr]

    program = whence.capture_step(step, (torch.ones(1, 3),), model=model, optimizer=optimizer)
    given = program.bind(model, optimizer)(torch.ones(1, 3))
    held = model.weight.grad
    assert held is not None
    before = held.clone()
    given.zero_()
    assert torch.equal(held, before)
