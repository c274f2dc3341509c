"""Layers that ask about sizes, take them, give them or make them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.tracing.replay.layered import Block, Stack


class Decides(Block):
    """Branches on a length."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Any:
        """One way above the limit, another below."""
        return self.mix(x) if x.shape[1] > self.limit else x + self.mix(x)


class Reshapes(Block):
    """Computes with sizes: heads, positions, a mean."""

    def forward(self, x: Tensor) -> Any:
        """Several nodes that hold sizes."""
        batch, length, width = x.shape
        heads = self.mix(x).view(batch, length, 2, width // 2).transpose(1, 2)
        positions = torch.arange(length, device=x.device) / length
        mixed = (heads * positions[:, None]).transpose(1, 2).reshape(batch * length, width)
        return x + mixed.view(batch, length, width) / (batch + length)


class Grows(Block):
    """Gives more rows than it takes."""

    def forward(self, x: Tensor) -> Any:
        """Each layer adds a row: no two are given the same length."""
        return torch.cat([self.mix(x), x[:, :1]], 1)


class Picks(Block):
    """Makes a size that only a run knows."""

    def forward(self, x: Tensor) -> Any:
        """Rows that are above their mean, summed."""
        chosen = x[x.sum(-1) > 0]
        return self.mix(x) + chosen.sum(0)


class Told(Block):
    """Is given a length."""

    def forward(self, x: Tensor, length: int = 1) -> Any:
        """A mean with its help."""
        return self.mix(x) + x.sum(1, keepdim=True) / length


class Telling(Stack):
    """Tells every layer the length, and the last two another one."""

    def forward(self, x: Tensor) -> Any:
        """The last result."""
        for number, block in enumerate(self.blocks):
            x = block(x, x.shape[1] * (1 if number < 3 else 2))
        return x


class Tells(Block):
    """Gives a length beside its result."""

    def forward(self, x: Tensor) -> Any:
        """The layer, and how many numbers it read."""
        return self.mix(x), x.shape[0] * x.shape[1]


class ToldBack(Stack):
    """Uses what the layers tell."""

    def forward(self, x: Tensor) -> Any:
        """The last result, divided by the lengths."""
        for block in self.blocks:
            x, count = block(x)
            x = x / count
        return x


class WritesInside(Block):
    """Writes to its own results, through a view as well."""

    def forward(self, x: Tensor) -> Any:
        """In place, and no argument is touched."""
        mixed = self.mix(x)
        mixed.mul_(2)
        mixed.view(x.shape[0], -1).add_(1)
        return mixed


class Around(Decides):
    """A layer with a layer inside: of the first, only what is inside can be replayed."""

    def __init__(self) -> None:
        super().__init__(2)
        self.inner = Block()

    def forward(self, x: Tensor) -> Any:
        """Two layers in one; it asks first."""
        return self.inner(self.mix(x) if x.shape[1] > self.limit else x)


class Decider(nn.Module):
    """Asks about the length between equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Any:
        """The last result."""
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2 and x.shape[1] < 3:
                x = x * 2
        return x
