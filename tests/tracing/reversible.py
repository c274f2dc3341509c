"""A reversible network: its blocks run again in the backward, which differentiates them there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Reversed(torch.autograd.Function):
    """Keeps what the last block gives, and nothing between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        for block in blocks:
            x = block(x)
        ctx.result, ctx.blocks = x.detach(), blocks
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        result = ctx.result
        for block in reversed(ctx.blocks):
            result, gradient = block.back(result, gradient)
        return gradient, None


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        with torch.no_grad():
            left = left + self.first(right)
            return torch.cat([left, right + self.second(left)], -1)

    def back(self, result: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """What the block was given, and the gradient of that."""
        (left, right), (of_left, of_right) = result.chunk(2, -1), gradient.chunk(2, -1)
        added, more = _differentiated(self.second, left, of_right)
        right, of_left = right - added, of_left + more
        added, more = _differentiated(self.first, right, of_left)
        return torch.cat([left - added, right], -1), torch.cat([of_left, of_right + more], -1)


def _differentiated(module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        result = module(x)
        torch.autograd.backward(result, gradient)
    assert x.grad is not None
    return result.detach(), x.grad


class Reversible(nn.Module):
    """`used_again` has a block called outside, too, whose parameters then have gradients of two kinds."""

    def __init__(self, *, used_again: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.used_again = used_again

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(Reversed.apply(self.first(x), self.blocks))
        if self.used_again:
            result = result * self.blocks[0].second(x.new_ones(4)).sum()  # type: ignore[operator]
        return result


def reversible(*, used_again: bool = False) -> Reversible:
    """The same bits at every call."""
    torch.manual_seed(0)
    return Reversible(used_again=used_again)


def rows(count: int = 5) -> Tensor:
    """The same numbers at every call."""
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
