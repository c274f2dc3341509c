"""Tensors in a file, and rows about them that say something else than their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whence.interop.archive import tensors
from whence.interop.archive.records.checked import Unreadable


def back(state: dict[str, Tensor]) -> dict[str, Tensor]:
    rows, numbers, faults = tensors.written(state)
    assert faults == []
    return tensors.read(rows, numbers)


def test_kinds_layouts_and_flags_come_back() -> None:
    """Parameters and buffers, strides with gaps, tensors without elements or dimensions, those on meta."""
    state = {
        "weight": nn.Parameter(torch.randn(3, 2).t()),
        "fixed": nn.Parameter(torch.randn(2), requires_grad=False),
        "buffer": nn.Buffer(torch.randn(2)),
        "spread": torch.randn(4, 6)[::2, ::3].clone(memory_format=torch.preserve_format).expand(2, 2),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(3),
        "large": torch.empty(2**20, 2**20, device="meta"),
        "graded": torch.randn(2).requires_grad_(),
    }
    found = back(state)
    assert list(found) == list(state)
    for name, held in state.items():
        again = found[name]
        assert (type(again), again.shape, again.stride()) == (type(held), held.shape, held.stride())
        assert (again.dtype, again.device) == (held.dtype, held.device)
        assert again.requires_grad is held.requires_grad
        assert held.is_meta or torch.equal(again, held)


def test_one_tensor_under_two_names_is_one() -> None:
    """What is tied is tied again."""
    held = torch.randn(3)
    found = back({"a": held, "b": held, "c": held[1:]})
    assert found["a"] is found["b"] and torch.equal(found["c"], held[1:])
    found["a"][1] = 7
    assert found["c"][0] == 7


def test_what_is_no_plain_tensor_is_a_fault() -> None:
    """Sparse and quantised ones."""
    _, _, faults = tensors.written({"s": torch.eye(2).to_sparse(), "t": torch.eye(2)})
    assert [row.what for row in faults] == ["the tensor s"]


@pytest.mark.parametrize(
    ("at", "value"),
    [(4, [3, 3]), (4, [-1]), (5, [2**61]), (2, "float99"), (2, "Tensor"), (1, "module"), (3, "x"), (6, 1)],
)
def test_rows_that_do_not_fit(at: int, value: Any) -> None:
    """Another shape, strides into nowhere, no dtype, no kind, no device, no flag."""
    rows, numbers, _ = tensors.written({"a": torch.randn(4)})
    rows[0][at] = value
    with pytest.raises((Unreadable, RuntimeError, ValueError, TypeError)):
        tensors.read(rows, numbers)
