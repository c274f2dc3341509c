"""Values that refuse to be differentiated."""

from typing import Any

import torch
from torch import Tensor

from whence.errors import NotDifferentiable


class Refusal(torch.autograd.Function):
    """Values that may be used, and raise when somebody differentiates through them."""

    @staticmethod
    def forward(ctx: Any, reason: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.reason = reason
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *_received: Tensor) -> Any:
        """Say why there is no gradient."""
        raise NotDifferentiable(
            "this program cannot be differentiated here",
            why=ctx.reason,
            remedy="capture the computation that you differentiate: with backward=True, with a loss function "
            "that contains all of it, or in a training step (whence.capture_step)",
        )
