"""Rows of several lengths: packed sequences and nested tensors are refused by name, or have eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import whence


class Ragged(nn.Module):
    def __init__(self, body: Callable[[Ragged, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.rnn, self.body = nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True), body

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.body(self, x, lengths)


def _packed(model: Ragged, x: Tensor, lengths: Any, **options: Any) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, **options)
    padded: Tensor = pad_packed_sequence(model.rnn(packed)[0], batch_first=True)[0]
    return padded


def _nested(made: Any) -> Any:
    return torch.nested.to_padded_tensor(made, 0.0)


RAGGED: dict[str, Callable[[Ragged, Tensor, Tensor], Any]] = {
    "packed": _packed,
    "packed in any order": lambda m, x, n: _packed(m, x, n, enforce_sorted=False),
    "packed by a list": lambda m, x, _: _packed(m, x, [5, 4, 2]),
    "packed by a size": lambda m, x, _: _packed(m, x, [x.shape[1]] * x.shape[0]),
    "nested": lambda m, x, _: _nested(torch.nested.as_nested_tensor([m.linear(x[0]), m.linear(x[1, :2])])),
    "nested, all of one length": lambda m, x, _: _nested(torch.nested.as_nested_tensor(m.linear(x))),
    "jagged": lambda m, x, _: _nested(
        torch.nested.as_nested_tensor([m.linear(x[0]), m.linear(x[1, :2])], layout=torch.jagged)
    ),
    "jagged by offsets": lambda m, x, n: (
        torch.nested.nested_tensor_from_jagged(m.linear(x).flatten(0, 1), torch.cat((n[:1] * 0, n.cumsum(0))))
        .cos()
        .values()
    ),
}
SIZES: dict[str, Any] = {
    "as they are": None,
    "batch": {"x": {0: Dim.DYNAMIC}, "lengths": {0: Dim.DYNAMIC}},
    "time": {"x": {1: Dim("time", max=64)}, "lengths": None},
}
CAPTURED = {("jagged", "as they are"), ("jagged", "batch")}
CAPTURED |= {("jagged by offsets", size) for size in SIZES}
"""A symbol stands for the lengths there."""


@pytest.mark.sample(11)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("body", RAGGED)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "tangents"])
def test_rows_of_several_lengths(body: str, sizes: str, backward: bool) -> None:
    """Refused with the line, but for jagged tensors; the model runs on as before."""
    model, given = Ragged(RAGGED[body]), (torch.randn(3, 5, 4), torch.tensor([5, 4, 2]))
    model(*given)
    if (body, sizes) in CAPTURED:
        program = whence.capture(model, given, backward=backward, dynamic_shapes=SIZES[sizes])
        assert program.verify(model, given).ok
        return
    with pytest.raises(whence.CaptureError) as caught:
        whence.capture(model, given, backward=backward, dynamic_shapes=SIZES[sizes])
    assert "test_ragged.py" in str(caught.value)
    assert caught.value.remedy
    model(*given)
