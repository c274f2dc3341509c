"""Recurrent networks on the CPU, step by step as the C++ kernels take them.

In place, on pieces of one tensor: a kernel gives other last bits on a piece than on a copy of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Weights = Sequence[Tensor | None]
"""Of the inputs and of the hidden state, then the biases of both, None where there are none."""
Cell = Callable[[Tensor, Any, Weights], Any]
"""The next state, from what the inputs' weights made of a step and from the state before."""


def gru_cell(step: Tensor, hidden: Tensor, weights: Weights) -> Tensor:
    reset_in, update_in, new_in = step.unsafe_chunk(3, 1)
    reset, update, new = _of_hidden(hidden, weights).unsafe_chunk(3, 1)
    reset.add_(reset_in).sigmoid_()
    update.add_(update_in).sigmoid_()
    found = new_in.add(new.mul_(reset)).tanh_()
    return (hidden - found).mul_(update).add_(found)


def simple_cell(
    nonlinearity: Callable[[Tensor], Tensor], step: Tensor, hidden: Tensor, weights: Weights
) -> Tensor:
    return nonlinearity(_of_hidden(hidden, weights).add_(step))


def _of_hidden(hidden: Tensor, weights: Weights) -> Tensor:
    held: Any = weights
    return linear(hidden, held[1], held[3])


def lstm_cell(step: Tensor, state: Any, weights: Weights) -> tuple[Tensor, Tensor]:
    """One step of an LSTM, whose state is the hidden state and the cell; a projection shortens the first."""
    hidden, cell = state
    pieces = _of_hidden(hidden, weights).add_(step).unsafe_chunk(4, 1)
    taken, kept, found, shown = (
        pieces[0].sigmoid_(),
        pieces[1].sigmoid_(),
        pieces[2].tanh_(),
        pieces[3].sigmoid_(),
    )
    cell = (kept * cell).add_(taken * found)
    hidden = shown * cell.tanh()
    projection: Any = weights[4] if len(weights) > 4 else None
    return (hidden if projection is None else hidden.matmul(projection.t())), cell


def recurrent(
    cell: Cell, inputs: Tensor, hidden: Tensor, params: Sequence[Tensor], *options: Any
) -> tuple[Tensor, Tensor]:
    """What `torch.gru` and its like give: all results, and the last hidden states.

    `options` are `has_biases, layers, dropout, train, bidirectional, batch_first`.
    """
    rows = _rows(params, 2, has_biases=options[0])
    results, ends = _stacked(cell, inputs, hidden.unbind(0), rows, options[1:])
    return results, torch.stack(ends)


def lstm(
    inputs: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What `torch.lstm` gives where no layer runs in oneDNN: all results, last hidden states and cells."""
    projects = hidden[0].shape[2] != hidden[1].shape[2]
    rows = _rows(params, 3 if projects else 2, has_biases=options[0])
    states = list(zip(hidden[0].unbind(0), hidden[1].unbind(0), strict=True))
    results, ends = _stacked(lstm_cell, inputs, states, rows, options[1:])
    return results, torch.stack([last for last, _ in ends]), torch.stack([cell for _, cell in ends])


def _stacked(
    cell: Cell, inputs: Tensor, states: Sequence[Any], rows: Sequence[Weights], options: Sequence[Any]
) -> tuple[Tensor, list[Any]]:
    """Layer upon layer; `options` are `layers, dropout, train, bidirectional, batch_first`."""
    layers, dropout, train, bidirectional, batch_first = options
    current = inputs.transpose(0, 1) if batch_first else inputs
    ends: list[Any] = []
    directions = 2 if bidirectional else 1
    for layer in range(layers):
        found = [
            _direction(cell, current, states[row], rows[row], is_reversed=bool(row % directions))
            for row in range(layer * directions, (layer + 1) * directions)
        ]
        ends += [last for _, last in found]
        current = torch.cat([all_steps for all_steps, _ in found], -1) if bidirectional else found[0][0]
        if dropout and train and layer < layers - 1:
            current = torch.dropout(current, dropout, train=True)
    return (current.transpose(0, 1) if batch_first else current), ends


def _rows(params: Sequence[Tensor], matrices: int, *, has_biases: bool) -> list[Weights]:
    """The weights of each layer and direction: two matrices, two biases or None, and the third matrix."""
    count = matrices + 2 if has_biases else matrices
    rows: list[Weights] = [params[at : at + count] for at in range(0, len(params), count)]
    return rows if has_biases else [(*row[:2], None, None, *row[2:]) for row in rows]


def _direction(
    cell: Cell, inputs: Tensor, state: Any, weights: Weights, *, is_reversed: bool
) -> tuple[Tensor, Any]:
    """All hidden states of a layer in one direction, in the order of the inputs, and the state made last."""
    held: Any = weights
    steps = list(linear(inputs, held[0], held[2]).unbind(0))
    found: list[Tensor] = []
    for step in reversed(steps) if is_reversed else steps:
        state = cell(step, state, weights)
        found.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(found[::-1] if is_reversed else found), state
