"""Models of equal layers, each with something that may forbid replaying them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    """A layer of a dozen operations; `scale` is read, `label` is not."""

    def __init__(self, scale: float = 1.0, label: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = scale
        self.label = label

    def mix(self, x: Tensor) -> Tensor:
        """What every kind of block computes."""
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale

    def forward(self, x: Tensor) -> Any:
        """The layer."""
        return self.mix(x)


class Stack(nn.Module):
    """Layers, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        """The last result."""
        for block in self.blocks:
            x = block(x)
        return x


class Stemmed(nn.Module):
    """Makes the argument of the first layer like those of the others: a result that carries a gradient."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.stack = stack

    def forward(self, x: Tensor) -> Any:
        """What the stack returns."""
        return self.stack(self.stem(x))


COUNTS = {"calls": 0}
TOTAL = 0
CURRENT: contextvars.ContextVar[float] = contextvars.ContextVar("CURRENT", default=1.0)
LOCAL = threading.local()


class CountsOnSelf(Block):
    """Counts its calls, and scales by them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.mix(x) * self.calls


class CountsOnClass(Block):
    """Counts on the class."""

    calls: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsOnClass.calls += 1
        return self.mix(x) * CountsOnClass.calls


class CountsInGlobal(Block):
    """Counts in a global variable."""

    def forward(self, x: Tensor) -> Tensor:
        global TOTAL  # noqa: PLW0603 (that is what is tested)
        TOTAL += 1
        return self.mix(x) * TOTAL


class CountsInDict(Block):
    """Counts in a global dictionary."""

    def forward(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return self.mix(x) * COUNTS["calls"]


class ReadsContext(Block):
    """Reads a context variable."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * CURRENT.get()


def counting() -> Callable[[], int]:
    """A function that counts in what it closes over."""
    count = 0

    def following() -> int:
        nonlocal count
        count += 1
        return count

    return following


FOLLOWING = counting()


class CountsInClosure(Block):
    """Counts in the closure of a global function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * FOLLOWING()


class Collects(Block):
    """Appends to a list that it is given."""

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        x = self.mix(x)
        if seen is not None:
            seen.append(x.tanh())
        return x


class CollectingStack(Stack):
    """Uses what its layers collected in a list."""

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        return x + torch.stack(seen).sum(0)


class Cache:
    """An object that layers read and fill."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, key: Tensor) -> Tensor:
        """Everything so far."""
        self.keys.append(key)
        return torch.cat(self.keys, 1)


class Caches(Block):
    """Reads and fills an object."""

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.mix(x)
        return x if cache is None else x + cache.update(x).mean(1, keepdim=True)


class CachingStack(Stack):
    """Passes one object along."""

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class Views(Block):
    """Returns a view of its argument, too."""

    def forward(self, x: Tensor) -> Any:
        return self.mix(x), x[:1]


class ViewingStack(Stack):
    """Uses both results of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, first = block(x)
            x = x + first
        return x


class WritesArgument(Block):
    """Writes to its argument."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.mix(x)


class WrittenStack(Stack):
    """Writes to what its layers return."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
        return x


class Normalises(Block):
    """Writes running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.batch(self.mix(x))


class Casts(Block):
    """May compute in lower precision."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            return self.mix(x).float()


class Checkpoints(Stack):
    """Computes the second half again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            x = block(x)
        for block in self.blocks[half:]:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Adapted(nn.Module):
    """A low-rank adapter beside a linear layer."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Linear(inner.in_features, 2, bias=False)
        self.b = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.b(self.a(x))


class MakesNumbers(Block):
    """Makes a tensor of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * torch.tensor([0.5] * WIDTH)


class Skips(Stack):
    """Hands the first input to every layer, and adds all results."""

    def forward(self, x: Tensor) -> Tensor:
        first, total, seen = x, x, []
        for block in self.blocks:
            seen.append(total)
            total = block(total + first) + total
        for before in reversed(seen):
            total = total + before.sin()
        return total


class Dense(Stack):
    """Every layer gets the sum of all before."""

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for block in self.blocks:
            seen.append(block(torch.stack(seen).sum(0)))
        return torch.cat(seen)


class Pair(Block):
    """Takes two tensors, which may be one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.mix(x) if x is y else self.mix(x) + self.mix(y)


class PairStack(Stack):
    """The same tensor twice, or two."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, x) if number % 3 else block(x, x + 1)
        return x


class Differentiates(Stack):
    """Takes a gradient while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        (force,) = torch.autograd.grad(y.sum(), x, create_graph=torch.is_grad_enabled())
        return y + force


class Hooked(Block):
    """Puts a hook on the gradient of what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x)
        if x.requires_grad:
            x.register_hook(torch.neg)
        return x


class Drops(Block):
    """Drops some of what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.mix(x), 0.5, self.training)


class Turned(Block):
    """Hands on the rows of another layer as columns, so that gradients arrive there in that layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()

    def forward(self, x: Tensor) -> Any:
        """A layer inside, and what mixes what comes of it."""
        return self.mix(self.first(x).transpose(0, 1)).transpose(0, 1).contiguous()


class Looks(Block):
    """A layer that looks at a memory through another one."""

    def __init__(self) -> None:
        super().__init__()
        self.through = Block()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Any:
        """The memory is read twice."""
        return self.mix(x + self.through(memory))


class LookingStack(Stack):
    """Layers that look at one memory, which another layer has made."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.first = Block()

    def forward(self, x: Tensor) -> Any:
        """Its gradients are added up, one by one."""
        memory = self.first(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


class Twofold(Block):
    """Returns a result that nobody uses, and its argument."""

    def forward(self, x: Tensor) -> Any:
        mixed = self.mix(x)
        return {"x": mixed, "unused": mixed.tanh().exp(), "given": x, "none": None}


class UsingOne(Stack):
    """Uses one result of its layers, and in the end all of the last."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            results = block(x)
            x = results["x"] + results["given"]
        return x, results
