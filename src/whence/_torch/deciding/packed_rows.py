"""Packed sequences: kernels in C++ read in memory how many rows each step has, which the example says."""

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from whence._torch.deciding.decider import Decider

_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def with_static_batch_sizes(
    decider: "Decider", func: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call of a function on packed rows as one that is given numbers for how many rows each step has."""
    if func == torch._pack_padded_sequence and decider.is_differentiated(args[0]):
        lengths = decider.content(Tensor.clone, args[1:2])
        return (func, args) if lengths is None else (packed, (args[0], lengths, *args[2:]))
    pads = func == torch._pad_packed_sequence
    is_packed = pads or (func in _RECURRENT and isinstance(args[3], list | tuple))
    counts = decider.content(Tensor.clone, args[1:2]) if is_packed else None
    if counts is None:
        return func, args
    return padded if pads else func, (args[0], counts, *args[2:])


def packed(data: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """What `pack_padded_sequence` does in C++, whose derivative reads in memory how many rows there are."""
    counts = lengths.tolist()
    steps = data.transpose(0, 1) if batch_first else data
    each = [sum(count > step for count in counts) for step in range(counts[0])]
    rows = [step * steps.shape[1] + row for step, count in enumerate(each) for row in range(count)]
    flat = steps.reshape(-1, *steps.shape[2:])
    return flat.index_select(0, torch.tensor(rows, device=data.device)), torch.tensor(each)


def padded(
    data: Tensor, counts: Tensor, batch_first: bool, padding_value: float, length: int
) -> tuple[Tensor, Tensor]:
    """What `pad_packed_sequence` does in C++: rows one step after another become sequences."""
    numbers = counts.tolist()
    found = data.new_full((length, numbers[0], *data.shape[1:]), padding_value)
    step = offset = 0
    for count, alike in groupby(numbers):
        steps = len(list(alike))
        rows = data.narrow(0, offset, steps * count).view(steps, count, *data.shape[1:])
        found.narrow(0, step, steps).narrow(1, 0, count).copy_(rows)
        step, offset = step + steps, offset + steps * count
    lengths = [sum(count > row for count in numbers) for row in range(numbers[0])]
    return found.transpose(0, 1) if batch_first else found, torch.tensor(lengths)
