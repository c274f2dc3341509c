"""An argument takes a gradient in a run, or takes none, whatever that of the capture did."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

import whence
from tests.checks import same_bits

Run = Callable[["Model", Tensor], Tensor]
X = torch.linspace(-2, 2, 24).view(3, 8)


class Square(torch.autograd.Function):
    """Its derivative is one that no operator has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x * 3


class Model(nn.Module):
    """A weight, and a function of an argument."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


@torch.no_grad()
def _doubled(x: Tensor) -> Tensor:
    return x * 2


def _written(_: Model, x: Tensor) -> Tensor:
    value = x * 1
    with torch.no_grad():
        value.clamp_(-1, 1)
    return value * x


def _other_data(_: Model, x: Tensor) -> Tensor:
    value = x.clone()
    value.data = value.data * 2
    return value * x


def _hooked(_: Model, x: Tensor) -> Tensor:
    value = x * 1
    if value.requires_grad:
        value.register_hook(lambda gradient: gradient * 2)
    return value


def _in_turn(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        with torch.enable_grad():
            value = m.linear(x)
        return_ = value * 2
    return value + return_


def _transformed_without(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        value: Tensor = func.grad(lambda each: each.pow(3).sum())(m.linear(x))
    return value + m.linear(x)


ROWS: dict[str, Run] = {
    "without_gradients": lambda m, x: _doubled(x) + m.linear(x),
    "argument_alone_without_gradients": lambda _, x: _doubled(x) + x,
    "written_without_gradients": _written,
    "with_gradients_inside": _in_turn,
    "a_function_of_its_own": lambda _, x: Square.apply(x),
    "a_function_of_its_own_and_a_layer": lambda m, x: Square.apply(x) + m.linear(x),
    "a_function_without_gradients": lambda m, x: Square.apply(x.detach()) + m.linear(x),
    "other_data": _other_data,
    "a_hook": _hooked,
    "derivative": lambda m, x: func.grad(lambda each: m.linear(each).pow(3).sum())(x * 1),
    "derivative_of_a_layer": lambda m, x: func.grad(lambda each: each.pow(3).sum())(m.linear(x)),
    "derivative_without_gradients": _transformed_without,
    "derivative_with_a_part_without": lambda m, x: func.grad(lambda each: (each * _doubled(each)).sum())(x),
    "product_with_a_derivative": lambda m, x: func.vjp(torch.tanh, m.linear(x))[1](x)[0],
    "each_without_gradients": lambda m, x: func.vmap(_doubled)(x) + m.linear(x),
    "each_derivative": lambda m, x: func.vmap(func.grad(lambda each: each.pow(3).sum()))(m.linear(x)),
}


def _ran(model: Model, run: Callable[[Tensor], Tensor], *, takes: bool, records: bool) -> list[Any] | None:
    """The result and all gradients; None where the run is refused."""
    x = X.clone().requires_grad_(takes)
    model.zero_grad()
    with torch.set_grad_enabled(records):
        try:
            out = run(x)
            if out.requires_grad:
                (out * out.detach().cos()).sum().backward()
        except whence.WhenceError:
            return None
    return [out.detach(), out.requires_grad, x.grad, *(each.grad for each in model.parameters())]


def _alike(expected: Any, found: Any) -> bool:
    return same_bits(expected, found) if isinstance(expected, Tensor) else expected is found


@pytest.mark.parametrize("records", [True, False], ids=["recording", "not recording"])
@pytest.mark.parametrize("takes", [True, False], ids=["with gradient", "without"])
@pytest.mark.parametrize("name", ROWS)
def test_a_run_is_eager_or_refused(name: str, takes: bool, records: bool) -> None:
    """Also where the argument of the capture took no gradient; where it was captured nothing is refused."""
    model = Model(ROWS[name])
    with torch.set_grad_enabled(records):
        try:
            program = whence.capture(model, (X.clone().requires_grad_(takes),))
        except whence.CaptureError:
            assert name == "other_data"
            assert takes
            return
    for run, mode in product((True, False), repeat=2):
        expected = _ran(model, model, takes=run, records=mode)
        for form in (program.module(), program.unflatten()):
            found = _ran(model, form, takes=run, records=mode)
            if found is None:
                assert (run, mode) != (takes, False)
                continue
            assert all(map(_alike, expected or [], found)), (run, mode)
