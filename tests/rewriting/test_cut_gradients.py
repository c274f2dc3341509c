"""Gradients stop in a forward-only program where they stop in eager, and pass where they pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from tests.tracing.writing import Bodies, Body, Writer, check

bodies = Bodies()
WITHOUT_GRAD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copied": lambda value, x: value.copy_(x.sin()),
    "copied_to_a_row": lambda value, x: value.t()[1].copy_(x[:, 2]),
    "compared": lambda value, _: value.gt_(0),
    "drawn_transposed": lambda value, _: value.t().bernoulli_(0.3),
    "multiplied_reshaped": lambda value, _: value.view(-1)[3:9].mul_(2),
    "multiplied_as_complex": lambda value, _: torch.view_as_complex(value.view(4, 4, 2)).mul_(2),
    "multiplied_in_a_list": lambda value, _: torch._foreach_mul_([value], 2),
    "chosen_transposed": lambda value, x: value.t().__setitem__(x.t() > 0, 0.5),
}
WITH_ZEROS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "drawn": lambda value, _: value.bernoulli_(0.3),
    "drawn_transposed": lambda value, _: value.t().bernoulli_(0.3),
    "normal": lambda value, _: value.normal_(),
    "uniform": lambda value, _: value.uniform_(),
    "exponential": lambda value, _: value.exponential_(),
    "normal_in_a_row": lambda value, _: value[1:].normal_(),
    "compared": lambda value, _: value.gt_(0),
    "compared_with_a_history": lambda value, x: value.le_(x[0]),
}


def _written(m: Writer, x: Tensor, write: Callable[[Tensor, Tensor], Any], *, records: bool) -> Tensor:
    value = m.linear(x).clone()
    with torch.set_grad_enabled(records):
        write(value, x * m.weight)
    return value * m.weight + value


@pytest.mark.parametrize("name", WITHOUT_GRAD)
def test_a_write_without_gradients(name: str) -> None:
    """It changes the number, and leaves the gradient of what it overwrote, through whatever view it goes."""
    check(lambda m, x: _written(m, x, WITHOUT_GRAD[name], records=False), "forward")


@pytest.mark.parametrize("mode", ["forward", "loss"])
@pytest.mark.parametrize("name", WITH_ZEROS)
def test_a_write_whose_gradient_is_zero(name: str, mode: str) -> None:
    """Zeros arrive where it wrote: its functional form has no derivative, or none that is connected."""
    check(lambda m, x: _written(m, x, WITH_ZEROS[name], records=True), mode)


@bodies.add
def nothing_but_zeros(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).clone().gt_(0)


@bodies.add
def numbers_drawn_like_a_value(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    return torch.randint_like(hidden, 7) * hidden + torch.randint_like(hidden, 2, 7)


@bodies.add
def negation_that_autograd_does_not_see(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).clone().logical_not_() * m.weight


@bodies.add
def view_read_again_without_gradients(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).clone()
    row = hidden.t()[0]
    hidden.mul_(2)
    with torch.no_grad():
        norm = row.norm()
    return row / norm


@bodies.parametrize()
def test_what_has_no_derivative(body: Body, mode: str) -> None:
    """Outputs and gradients are eager's bits, zeros and None among them."""
    check(body, mode)


def test_noise_without_a_history_is_drawn_as_it_was() -> None:
    """Only what has a gradient is chosen over."""
    body: Body = lambda m, x: m.linear(x) + torch.empty_like(x).normal_()  # noqa: E731
    program = check(body, "forward")
    assert all(node.target is not torch.ops.aten.where.self for node in program.nodes())


def test_seed_of_a_backward_that_is_nothing_but_zeros() -> None:
    """It stays, although nothing reads it, and with it the loss has a history."""
    program = check(nothing_but_zeros, "loss").apply(whence.rewriting.DeadCode())
    assert program.facts.seed is not None
