"""Small modules that several tests of this folder capture."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Block(nn.Module):
    """Two linear layers with a buffer between them."""

    scale: Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.full((2 * width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.scale)


class Containers(nn.Module):
    """A nested dict and a tuple in, another nest of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, batch: dict[str, Any], pair: tuple[Tensor, list[Tensor]]) -> dict[str, Any]:
        first, rest = pair
        mixed = self.block(batch["x"]) + batch["inner"]["y"] * first
        return {"mixed": mixed, "nest": ([mixed.sum(), *rest], {"first": first + 1}), "count": len(rest)}


class Mode(Enum):
    """A choice a model takes as an argument."""

    ADD = 1
    SUBTRACT = 2


class Modal(nn.Module):
    """Python values decide what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        times: int,
        double: bool,
        activation: str,
        bias: Tensor | None = None,
        mode: Mode = Mode.ADD,
    ) -> Tensor:
        for _ in range(times):
            x = self.linear(x)
        x = 2 * x if double else x
        x = torch.relu(x) if activation == "relu" else torch.tanh(x)
        if bias is not None:
            x = x + bias
        return x + 1 if mode is Mode.ADD else x - 1


class Point(NamedTuple):
    """A pair of tensors with names."""

    x: Tensor
    y: Tensor


@dataclass
class Batch:
    """A dataclass that torch.export knows."""

    tokens: Tensor
    mask: Tensor | None = None


torch.export.register_dataclass(Batch, serialized_type_name="whence.tests.upstream.Batch")


class Box:
    """A container registered as a pytree node."""

    def __init__(self, content: Any, label: str) -> None:
        self.content = content
        self.label = label


pytree.register_pytree_node(
    Box,
    lambda box: ([box.content], box.label),
    lambda contents, label: Box(next(iter(contents)), label),
    flatten_with_keys_fn=lambda box: ([(pytree.GetAttrKey("content"), box.content)], box.label),
    serialized_type_name="whence.tests.upstream.Box",
)


@dataclass(frozen=True)
class Settings:
    """A class registered as a constant: it holds no tensors and compares by value."""

    power: int


pytree.register_constant(Settings)


class Stranger:
    """A class that nobody registered."""

    def __init__(self, content: Tensor) -> None:
        self.content = content


class Counter(nn.Module):
    """Counts its calls in a buffer and adds the count; adds a number, too, when it is given one."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor, extra: int = 0) -> Tensor:
        self.count.add_(1)
        return x * self.weight + self.count + extra
