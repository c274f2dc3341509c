"""Defect 15: nothing is printed or logged, neither by a capture nor by what comes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.arange(8.0).reshape(2, 4) / 10


class Counting(nn.Module):
    """Writes a buffer in every call."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) + self.count


class Reads(nn.Module):
    """Reads the buffer of a child between its writes, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, x: Tensor) -> Tensor:
        first = self.inner(x) + self.inner.count
        between = self.inner.count * 2
        return self.inner(first) + between + self.inner.count


def captured(model: nn.Module) -> Any:
    return whence.capture(model, (X,)).unflatten(copy=True)


def preserved(model: nn.Module) -> Any:
    return whence.capture(model, (X,), preserve_calls="inner").unflatten(copy=True)


def joint(model: nn.Module) -> Any:
    return whence.capture(model, (X,), backward=True).unflatten(copy=True)


def exported(model: nn.Module) -> Any:
    return whence.unflatten(torch.export.export(model, (X,), preserve_module_call_signature=("inner",)))


def decomposed(model: nn.Module) -> Any:
    return whence.unflatten(torch.export.export(model, (X,)).run_decompositions({}))


@pytest.mark.parametrize("read", [captured, preserved, joint, exported, decomposed], ids=lambda f: f.__name__)
def test_defect_15_intermediate_values_are_read_in_silence(
    read: Callable[[nn.Module], Any], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A buffer's value between two writes is eager's; stdout, stderr and the log stay empty."""
    torch.manual_seed(0)
    model = Reads()
    tree = read(model)
    capfd.readouterr()  # what PyTorch's exporter says
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="whence"):
        found = [tree(X), tree(X)]
    assert [torch.equal(value, model(X)) for value in found] == [True, True]
    assert tree.inner.count == model.inner.count == 4
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_is_printed(backward: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """A capture, its check, its tree, its swap, its training and its errors print nothing."""
    model = Reads()
    capfd.readouterr()
    program = whence.capture(model, (X,), backward=backward, preserve_calls="inner.linear")
    assert program.verify(model, (X,)).ok
    assert program.check(model, (X,)) == []
    tree = program.unflatten(copy=True)
    tree.set_submodule("inner.linear", nn.Linear(4, 4))
    tree(X).sum().backward()
    with pytest.raises(whence.CallError):
        tree(X[0])
    with pytest.raises(whence.CallError):
        tree(X, X)
    assert capfd.readouterr() == ("", "")
