"""Canaries: where hooks on autograd's nodes, writes of custom functions and dispatch modes are told."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from whence._torch.autograd.own_derivatives import observed_derivatives


class Dirty(torch.autograd.Function):
    """Doubles in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


class Passing(TorchDispatchMode):
    """Hands everything on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.canary("torch.autograd.Function._register_hook")
def test_what_changes_derivatives_is_told() -> None:
    """C++ registers hooks on nodes through `Function._register_hook`, before and after the node."""
    told: list[str] = []
    x = torch.ones(2, requires_grad=True)
    before = torch.autograd.Function._register_hook
    with observed_derivatives(told.append):
        hidden = x.sin()
        assert hidden.grad_fn is not None
        hidden.grad_fn.register_hook(lambda gradients, _: (gradients[0] * 3,))
        hidden.grad_fn.register_prehook(lambda gradients: (gradients[0] * 5,))
        Dirty.apply(hidden)
        Dirty.apply(torch.ones(2))
        with Passing(), FlopCounterMode(display=False):
            torch.ones(2).sin()
    assert [what.partition(" at ")[0].split(".")[0] for what in told] == [
        *["the hook test_what_changes_derivatives_is_told"] * 2,
        "the custom autograd function Dirty",
        "the dispatch mode Passing",
    ]
    [gradient] = torch.autograd.grad(hidden.sum(), [x])
    assert torch.equal(gradient, 2 * torch.full((2,), 5.0) * x.detach().cos() * 3)
    assert torch.autograd.Function._register_hook is before
