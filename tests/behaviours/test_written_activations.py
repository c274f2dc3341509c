"""Activations in place whose derivative is computed from what they wrote."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whence
from tests.checks import verified

Body = Callable[[Tensor], Tensor]

OTHERS: dict[str, Body] = {
    "elu_": F.elu_,
    "celu_": F.celu_,
    "selu_": F.selu_,
    "threshold_": lambda x: torch.threshold_(x, 0.1, 20),
}
"""In place they have another derivative, or other last bits, than out of place."""
ALIKE: dict[str, Body] = {
    "leaky_relu_": F.leaky_relu_,
    "threshold_": lambda x: torch.threshold_(x, 0.1, -1),
    "hardtanh_": F.hardtanh_,
    "elu": F.elu,
}


def scaled(body: Body) -> nn.Module:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return body(x * 2)

    return Scaled()


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("seed", range(5))
def test_joint_program(name: str, seed: int) -> None:
    """The recorded derivative is the one in place."""
    x = torch.randn(60, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    verified(scaled(OTHERS[name]), x, backward=True)


@pytest.mark.parametrize("name", OTHERS)
def test_forward_program_is_not_differentiated(name: str) -> None:
    """Autograd would take the other derivative: refused by name, and the numbers are eager's."""
    x = torch.randn(60, requires_grad=True)
    program = verified(scaled(OTHERS[name]), x)
    for module in (program.module(), program.unflatten()):
        with pytest.raises(whence.errors.NotDifferentiable, match=r"ran \w+_ \(its derivative in place"):
            module(x).sum().backward()


@pytest.mark.parametrize("name", ALIKE)
def test_forward_program_is_differentiated(name: str) -> None:
    """Where both derivatives are the same numbers, autograd takes the one that there is."""
    x = torch.randn(60, requires_grad=True)
    assert verified(scaled(ALIKE[name]), x).circumstances.opaque == ()


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_ of a row": lambda x, w: x.add_(w[0]),
    "add_ times a number": lambda x, w: x.add_(w, alpha=0.3),
    "sub_ of a row": lambda x, w: x.sub_(w[0]),
    "mul_": lambda x, w: x.mul_(w),
    "pow_": lambda x, w: x.abs().pow_(w),
    "atan2_": lambda x, w: x.atan2_(w),
}
"""What writes halves in place, with operands that are wider, rounds the gradients of those otherwise."""
MIXED_ALIKE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda x, w: x.add_(w),
    "div_": lambda x, w: x.div_(w),
    "copy_": lambda x, w: x.copy_(w),
    "copy_ of a row": lambda x, w: x.copy_(w[0]),
    "mul_ by a number": lambda x, w: x.mul_(w.sum()),
    "mul_ by halves": lambda x, w: x.mul_(w.bfloat16()),
}


class Mixing(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.bfloat16() * 2, self.weight)


@pytest.mark.parametrize("name", MIXED)
def test_forward_program_that_rounds_otherwise_is_not_differentiated(name: str) -> None:
    """Its numbers are eager's, its gradients are refused by name; joint programs have them."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    program = verified(Mixing(MIXED[name]), x)
    with pytest.raises(whence.errors.NotDifferentiable, match=r"ran \w+_ \(its derivative in place"):
        program.module()(x).sum().backward()
    verified(Mixing(MIXED[name]), x, backward=True)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", MIXED_ALIKE)
def test_mixed_write_is_differentiated(name: str, *, backward: bool) -> None:
    """What hands a gradient on, or computes it in the wider dtype itself, has the same bits either way."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    program = verified(Mixing(MIXED_ALIKE[name]), x, backward=backward)
    assert not program.circumstances.opaque
