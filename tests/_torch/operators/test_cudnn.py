"""Calls of recurrent networks as cuDNN takes them, and the fakes of what it gives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from whence._torch.operators.cudnn import (
    is_for_cudnn,
    keeps_dropout_state,
    normalized,
    recurrent_backward,
    recurrent_laid_out,
)
from whence._torch.operators.table import said_of

aten = torch.ops.aten


def arguments(batch_first: bool = False, device: str = "cuda") -> tuple[Any, ...]:
    """Those of an LSTM of two layers, as PyTorch's module passes them, on fakes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = (2, 5, 4) if batch_first else (5, 2, 4)
        x = torch.empty(shape, device=device)
        hidden = tuple(torch.empty(2, 2, 6, device=device) for _ in range(2))
        weights = [torch.empty(row.shape, device=device) for row in nn.LSTM(4, 6, 2).parameters()]
    return x, hidden, weights, True, 2, 0.5, True, False, batch_first


def test_calls_on_a_device_are_cudnns() -> None:
    """Not on the CPU, not of packed rows, and not where it is turned off."""
    assert is_for_cudnn(torch.lstm, arguments())
    assert not is_for_cudnn(torch.lstm, arguments(device="cpu"))
    assert not is_for_cudnn(torch.sin, arguments())
    with torch.backends.cudnn.flags(enabled=False):
        assert not is_for_cudnn(torch.lstm, arguments())


def test_dropout_between_layers_has_a_state() -> None:
    """In training, with more than one layer."""
    assert keeps_dropout_state(arguments())
    assert not keeps_dropout_state((*arguments()[:6], False, False, False))
    assert not keeps_dropout_state((*arguments()[:4], 1, 0.5, True, False, False))


@pytest.mark.parametrize("batch_first", [False, True])
def test_fakes_lie_as_the_kernel_lays_out(batch_first: bool) -> None:
    """The steps are first in memory, and there is a buffer of all weights."""
    x, (hidden, cells), weights, *_ = arguments(batch_first)
    sizes: tuple[Any, ...] = (2, 6, 0, 2, batch_first, 0.0, True, False, [], None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = x.new_empty((*x.shape[:2], 6))
        given = (output, hidden, cells, x.new_empty(0, dtype=torch.uint8), None)
        found = recurrent_laid_out((x, weights, 4, None, hidden, cells, *sizes), given)
    steps_first = torch.empty(5, 2, 6, device="meta")
    expected = steps_first.transpose(0, 1) if batch_first else steps_first
    assert found[0].stride() == expected.stride()
    assert found[4].shape == (sum(row.numel() for row in weights),)


def test_gradients_are_those_that_are_asked_for() -> None:
    """Of a network without cells there are none of cells."""
    x, (hidden, _), weights, *_ = arguments(batch_first=True)
    sizes: tuple[Any, ...] = (3, 6, 0, 2, True, 0.0, True, False, [], None)
    rest = (None, x, None, None, *sizes, x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        of_input, of_hidden, of_cells, of_weights = recurrent_backward(
            x, weights, 4, x, hidden, None, *rest, [True, False, True, True]
        )
    assert (of_hidden, of_cells) == (None, None)
    assert of_input.shape == x.shape
    assert [row.shape for row in of_weights] == [row.shape for row in weights]


def test_normalised_batches_keep_their_layout() -> None:
    """Channels last, as the statistics are kept in their own dtype."""
    x: Tensor = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    result, *rest = normalized(x, None, None, torch.zeros(3), torch.ones(3), 0.1, 1e-5)
    assert result.stride() == x.stride()
    assert [row.shape[0] for row in rest] == [3, 3, 0, 3, 3]
    assert said_of(aten._batch_norm_with_update_functional.default).fake is normalized
