"""GRUs and simple recurrent networks on the CPU, step by step as the C++ kernels take them.

In place, on pieces of one tensor: a kernel gives other last bits on a piece than on a copy of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Weights = Sequence[Tensor | None]
"""Of the inputs and of the hidden state, then the biases of both, None where there are none."""
Cell = Callable[[Tensor, Tensor, Weights], Tensor]
"""The next hidden state, from what the inputs' weights made of a step and from the hidden state before."""


def gru_cell(step: Tensor, hidden: Tensor, weights: Weights) -> Tensor:
    """One step of a GRU."""
    reset_in, update_in, new_in = step.unsafe_chunk(3, 1)
    reset, update, new = _of_hidden(hidden, weights).unsafe_chunk(3, 1)
    reset.add_(reset_in).sigmoid_()
    update.add_(update_in).sigmoid_()
    found = new_in.add(new.mul_(reset)).tanh_()
    return (hidden - found).mul_(update).add_(found)


def simple_cell(
    nonlinearity: Callable[[Tensor], Tensor], step: Tensor, hidden: Tensor, weights: Weights
) -> Tensor:
    """One step of a simple network."""
    return nonlinearity(_of_hidden(hidden, weights).add_(step))


def _of_hidden(hidden: Tensor, weights: Weights) -> Tensor:
    held: Any = weights
    return linear(hidden, held[1], held[3])


def recurrent(
    cell: Cell, inputs: Tensor, hidden: Tensor, params: Sequence[Tensor], *options: Any
) -> tuple[Tensor, Tensor]:
    """What `torch.gru` and its like give: all results, and the last hidden states.

    `options` are `has_biases, layers, dropout, train, bidirectional, batch_first`.
    """
    has_biases, layers, dropout, train, bidirectional, batch_first = options
    rows = _rows(params, has_biases)
    states = hidden.unbind(0)
    current = inputs.transpose(0, 1) if batch_first else inputs
    ends: list[Tensor] = []
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
    return (current.transpose(0, 1) if batch_first else current), torch.stack(ends)


def _rows(params: Sequence[Tensor], has_biases: bool) -> list[Weights]:
    """The weights of each layer and direction."""
    if has_biases:
        return [params[at : at + 4] for at in range(0, len(params), 4)]
    return [(*params[at : at + 2], None, None) for at in range(0, len(params), 2)]


def _direction(
    cell: Cell, inputs: Tensor, hidden: Tensor, weights: Weights, *, is_reversed: bool
) -> tuple[Tensor, Tensor]:
    """All hidden states of a layer in one direction, in the order of the inputs, and the one made last."""
    held: Any = weights
    steps = list(linear(inputs, held[0], held[2]).unbind(0))
    found: list[Tensor] = []
    for step in reversed(steps) if is_reversed else steps:
        hidden = cell(step, hidden, weights)
        found.append(hidden)
    return torch.stack(found[::-1] if is_reversed else found), hidden
