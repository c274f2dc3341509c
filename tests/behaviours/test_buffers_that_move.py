"""Buffers that are handed on to each other are eager's, run after run, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import differing


class Moving(nn.Module):
    """Reads two buffers, and moves them."""

    first: Tensor
    second: Tensor

    def __init__(self, move: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.move = move
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("second", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        found = self.first * 3 + self.second + x
        self.move(self, x)
        return found


def shift(m: Moving, x: Tensor) -> None:
    m.second = m.first
    m.first = x * 2


def swap(m: Moving, x: Tensor) -> None:
    m.first, m.second = m.second, m.first


def the_same(m: Moving, x: Tensor) -> None:
    m.first = m.second = x * 2


@pytest.mark.parametrize("move", [shift, swap, the_same])
@pytest.mark.parametrize("inner", [False, True], ids=["root", "inner"])
def test_buffers_are_eager(move: Callable[[Any, Tensor], None], inner: bool) -> None:
    """Flat and as a tree, also in a module inside another."""

    def made() -> nn.Module:
        return nn.Sequential(Moving(move)) if inner else Moving(move)

    program = whence.capture(made(), (torch.ones(2),))
    for run in (program.module(copy=True), program.unflatten(copy=True)):
        eager = made()
        for number in range(4):
            x = torch.ones(2) * number
            assert torch.equal(run(x), eager(x))
            expected, found = (dict(held.named_buffers(remove_duplicate=False)) for held in (eager, run))
            assert differing(expected, found) == []


@pytest.mark.parametrize("way", ["assigned", "data"])
def test_buffers_in_one_memory_that_is_written_are_refused(way: str) -> None:
    """From the second run on eager writes both, and a program would write one."""

    def move(m: Moving, x: Tensor) -> None:
        m.first += 1
        value = x * 2
        m.second = value
        if way == "data":
            m.first.data = value
        else:
            m.first = value

    with pytest.raises(whence.UnsupportedMutation, match="into the memory of"):
        whence.capture(Moving(move), (torch.ones(2),))
