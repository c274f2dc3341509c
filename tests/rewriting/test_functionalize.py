"""What a write in place computes is what its functional form computes, to the last bit."""

import pytest
import torch
from torch import Tensor, nn

import whence


class Scaled(nn.Module):
    """Multiplies by a number in place, alone or in a list."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> list[Tensor]:
        held = [x.sin(), x.cos()]
        if self.way == "list":
            torch._foreach_mul_(held, 0.3)
        elif self.way == "numbers":
            torch._foreach_mul_(held, [0.3, 0.7])
        else:
            torch.ops.aten.mul_.Scalar(held[0], 0.3)
        return held


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("way", ["list", "numbers", "alone"])
def test_half_precision_is_multiplied_by_a_rounded_number(way: str, dtype: torch.dtype) -> None:
    """In place a CPU rounds the number first, and the functional operators do not."""
    x = torch.linspace(-2, 2, 64).to(dtype)
    program = whence.capture(Scaled(way), (x,))
    assert all(map(torch.equal, program.module()(x), Scaled(way)(x)))
