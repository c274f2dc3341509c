"""Recurrent layers one by one, where PyTorch would forget the dropout between them.

Where sizes vary, `torch.gru` and `torch.rnn_*` run as PyTorch's own Python decomposition, whose test for the
last layer is turned around (`num_layers < i - 1`, torch 2.13): it never drops anything.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_FORGETFUL = frozenset({torch.gru, torch.rnn_tanh, torch.rnn_relu})


def forgets_dropout(function: object, args: Sequence[Any]) -> bool:
    """Whether a call has dropout between layers that its decomposition would leave out."""
    if function not in _FORGETFUL or len(args) < 8:
        return False
    at = _weights_at(args)
    layers, dropout, training = args[at + 2 : at + 5]
    return bool(training) and dropout > 0 and layers > 1


def layer_by_layer(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """What the call gives: each layer is one call, and dropout is applied between them as in C++."""
    at = _weights_at(args)
    hidden, weights = args[at - 1], args[at]
    has_biases, layers, dropout, training, is_double, *batch_first = args[at + 1 :]
    swaps = bool(batch_first and batch_first[0])
    inputs, *sizes = args[: at - 1]
    current = inputs.transpose(0, 1) if swaps else inputs
    rest = (False,) if batch_first else ()
    width, last = len(weights) // layers, []
    for number, states in enumerate(hidden.split(2 if is_double else 1)):
        if number:
            current = torch.dropout(current, dropout, True)
        own = weights[number * width : (number + 1) * width]
        current, final = function(
            current, *sizes, states, own, has_biases, 1, 0.0, training, is_double, *rest
        )
        last.append(final)
    return (current.transpose(0, 1) if swaps else current), torch.cat(last)


def _weights_at(args: Sequence[Any]) -> int:
    """The position of the weights: behind input and hidden state, or packed rows, their sizes and state."""
    return 2 if isinstance(args[2], list | tuple) else 3
