"""A model whose forward is one small function, and the check that its program is eager in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import Backward, verified

WIDTH = 8
BACKWARD: dict[str, Backward] = {}


class Writer(nn.Module):
    """A linear layer, a free weight and two buffers, used by a function of the model and its input."""

    table: Tensor
    count: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("table", torch.randn(4, WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


Body = Callable[[Writer, Tensor], Any]


def sines(outputs: Any) -> Tensor:
    """A scalar that depends on every element of every tensor among the outputs."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return torch.stack([tensor.to(torch.float32).sin().sum() for tensor in tensors]).sum()


BACKWARD.update(forward=False, tangents=True, loss=sines)


class Bodies:
    """The functions of one test file, each a case under its own name."""

    def __init__(self) -> None:
        self.all: dict[str, Body] = {}

    def add(self, body: Body) -> Body:
        """A decorator."""
        self.all[body.__name__] = body
        return body

    def parametrize(self) -> pytest.MarkDecorator:
        """Every function in every mode; tangents, of which a loss shows all but the beginning, are slow."""
        names = [(name, mode) for mode in BACKWARD for name in self.all]
        cases = [
            pytest.param(
                self.all[name],
                mode,
                id=f"{name}-{mode}",
                marks=pytest.mark.slow if mode == "tangents" else (),
            )
            for name, mode in names
        ]
        return pytest.mark.parametrize(("body", "mode"), cases)


def writer_and_input(body: Body) -> tuple[Writer, Tensor]:
    """The model of a function, and four rows of input: the same bits at every call."""
    torch.manual_seed(0)
    return Writer(body), torch.randn(4, WIDTH)


def check(body: Body, mode: str) -> whence.Program:
    """The program of a function, compared with eager bit for bit."""
    model, x = writer_and_input(body)
    return verified(model, x, backward=BACKWARD[mode])
