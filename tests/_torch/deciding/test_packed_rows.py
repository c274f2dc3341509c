"""Packed sequences are padded as C++ pads them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import whence
from tests.checks import same_bits
from whence._torch.deciding.packed_rows import padded


@pytest.mark.parametrize("lengths", [[5, 3, 3], [4, 4, 4], [2, 1, 1], [5, 4, 1]])
@pytest.mark.parametrize("batch_first", [False, True])
def test_as_pytorch_pads(lengths: list[int], batch_first: bool) -> None:
    """Rows, lengths and layout."""
    packed = pack_padded_sequence(torch.randn(3, 5, 2), lengths, batch_first=True)
    expected = pad_packed_sequence(packed, batch_first, padding_value=7.0, total_length=6)
    found = padded(packed.data, packed.batch_sizes, batch_first, 7.0, 6)
    assert all(map(same_bits, found, expected))
    assert found[0].stride() == expected[0].stride()


class Rows(nn.Module):
    """Sequences of other lengths, through a recurrent network."""

    def __init__(self, network: Callable[..., nn.Module], *, is_sorted: bool) -> None:
        super().__init__()
        self.network = network(4, 4, 2, batch_first=True, dropout=0.3)
        self.is_sorted = is_sorted

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.is_sorted)
        rows, found = pad_packed_sequence(self.network(packed)[0], batch_first=True)
        return rows * found[:, None, None]


@pytest.mark.sample(2)
@pytest.mark.canary("torch._pack_padded_sequence", "torch._pad_packed_sequence")
@pytest.mark.parametrize("network", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("lengths", [(5, 3), (2, 5)])
def test_lengths_of_the_example_decide(
    network: Callable[..., nn.Module], backward: bool, lengths: tuple[int, int]
) -> None:
    """Forward and backward are eager's, and other lengths are refused."""
    model = Rows(network, is_sorted=lengths == (5, 3))
    inputs = torch.randn(2, 5, 4), torch.tensor(lengths)
    program = whence.capture(model, inputs, backward=backward, decide="example")
    result = program.verify(model, inputs)
    assert result.ok, str(result)
    with pytest.raises(whence.StaleCapture, match="_pack_padded_sequence"):
        program.module()(inputs[0], inputs[1] - 1)
