"""Derivatives of derivatives inside a model, in every spelling: with eager's bits, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import hessian, jacfwd, jacrev, jvp, linearize, vmap

import whence
from tests.checks import Backward, verified

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated", "ignore:Attempted to insert a get_attr Node"
)
Rows = Callable[[Tensor], Tensor]


def dual(f: Rows, x: Tensor) -> Tensor:
    """The derivative in one direction, by PyTorch's dual numbers."""
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x))))
        return value + tangent


TAKEN: dict[str, Callable[[Rows, Tensor], Any]] = {
    "hessian": lambda f, x: hessian(f)(x[0]),
    "hessian of a batch": lambda f, x: hessian(f)(x),
    "hessian of vmap": lambda f, x: hessian(lambda rows: vmap(f)(rows).sum())(x),
    "jacfwd of jacrev": lambda f, x: jacfwd(jacrev(f))(x),
    "jacrev of jacfwd": lambda f, x: jacrev(jacfwd(f))(x),
    "vmap of hessian": lambda f, x: vmap(hessian(f))(x),
    "vmap of hessian in chunks": lambda f, x: vmap(hessian(f), chunk_size=2)(x),
    "vmap of jacrev of jacfwd": lambda f, x: vmap(jacrev(jacfwd(f)))(x),
    "vmap of jacfwd of jacfwd": lambda f, x: vmap(jacfwd(jacfwd(f)))(x),
    "vmap of jacrev of jacrev": lambda f, x: vmap(jacrev(jacrev(f)))(x),
    "vmap of jvp": lambda f, x: vmap(lambda row: jvp(f, (row,), (row,))[1])(x),
    "linearize": lambda f, x: linearize(f, x)[1](x),
}

REFUSED = {"vmap of hessian", "vmap of hessian in chunks", "linearize"}
"""PyTorch's fake tensors cannot do these: a tangent of zeros is on no device there."""
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda y: y.tanh().sum(),
    "softmax": lambda y: y.softmax(-1).square().sum(),
}


class Derived(nn.Module):
    def __init__(self, taken: str, function: str) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), FUNCTIONS[function]
        self.taken = TAKEN.get(taken, dual)

    def forward(self, x: Tensor) -> Any:
        return self.taken(lambda row: self.function(self.linear(row)), x)


@pytest.mark.sample(10)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "tangents"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("taken", TAKEN)
def test_every_spelling(taken: str, function: str, backward: Backward) -> None:
    """Bitwise, or an error that says what to do."""
    model, x = Derived(taken, function), torch.randn(3, 4)
    try:
        verified(model, x, backward=backward)
    except whence.CaptureError as error:
        assert taken in REFUSED
        assert ("jacrev(jacrev(f))" if "meta and" in str(error) else "") in error.remedy
        assert "another device" not in str(error)
        assert not isinstance(error, whence.DataDependent)
    torch.manual_seed(0)
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "tangents"])
def test_dual_numbers(backward: Backward) -> None:
    """What dual numbers compute is recorded; PyTorch does not differentiate their softmax."""
    verified(Derived("dual numbers", "tanh"), torch.randn(3, 4), backward=backward)
