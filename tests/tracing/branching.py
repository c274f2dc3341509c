"""Modules with branches, loops and attention by parts, for tests of operators that run functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class Cond(nn.Module):
    """Submodules, a shared weight and a buffer in branches that also read an activation from around them."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.weight = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)

        def positive(x: Tensor) -> Tensor:
            return self.left(x) * self.weight + h

        def negative(x: Tensor) -> Tensor:
            return self.right(x) + self.shift * self.weight * h.cos()

        return torch.cond(x.sum() > 0, positive, negative, (x,)).sin()


class Nested(nn.Module):
    """A branch in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2

        def inner(x: Tensor) -> Tensor:
            return torch.cond(x.mean() > 1, lambda x: self.a(x) + h, lambda x: self.b(x) * h, (x,))

        return torch.cond(x.sum() > 0, inner, lambda x: self.c(x).relu(), (x,))


class Twice(nn.Module):
    """A module with a branch, called twice inside a parent."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Cond()
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.inner(x) - 0.5))


class Constants(nn.Module):
    """Branches that return numbers and close over one; PyTorch does not differentiate these."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        count = 3

        def positive(x: Tensor) -> dict[str, Any]:
            return {"y": x.sin() * count, "n": 2}

        return torch.cond(x.sum() > 0, positive, lambda x: {"y": x.cos(), "n": 2}, (x,))


class Made(nn.Module):
    """A branch that makes tensors, one of them of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def positive(x: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            y[:, 0] = self.a(x)[:, 1]
            return y + torch.tensor([1.0, 2.0, 3.0, 4.0])

        return torch.cond(x.sum() > 0, positive, lambda x: self.a(x) + torch.ones(4), (x,))


class Dropped(nn.Module):
    """Random numbers in a branch, and after it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: nn.functional.dropout(x, 0.5), lambda x: x * 2, (x,))
        return nn.functional.dropout(y + x, 0.5)


class Detached(nn.Module):
    """A part of a branch runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def positive(x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.a(x).mean()
            return self.a(x) * scale

        return torch.cond(x.sum() > 0, positive, lambda x: self.a(x).detach() + x, (x,))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).mean(0)
        return torch_map(lambda row, shift: self.a(row).relu() + shift * h, x, x[0].clone())  # type: ignore[arg-type]


class Scanned(nn.Module):
    """Dictionaries are carried, and weights read."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        def step(carry: dict[str, Tensor], row: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            new = torch.tanh(self.cell(carry["h"]) + row)
            return {"h": new}, {"y": new * 2}

        return scan(step, {"h": x.mean(0)}, x)


class Loop(nn.Module):
    """Weights are read in the body of a loop, and the number of rounds is that of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        limit = x.sum().abs().long() % 4

        def more(count: Tensor, _x: Tensor) -> Tensor:
            return count < limit

        def step(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, self.b(x).tanh()

        return while_loop(more, step, (torch.zeros((), dtype=torch.int64), self.a(x)))[1]


class Attention(nn.Module):
    """A block of a transformer on flex attention, with a bias that is learnt and a block mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.slope = nn.Parameter(torch.tensor([0.1, 0.3]))
        self.mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu", BLOCK_SIZE=8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        slope = self.slope.tanh()

        def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + slope[h] * (q - k)

        found = flex_attention(q, k, v, score_mod=bias, block_mask=self.mask)
        return x + self.out(found.transpose(1, 2).flatten(-2))
