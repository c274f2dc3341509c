"""What cuDNN computes (recurrent networks, batches that are normalised), and fake kernels that PyTorch lacks.

C++ reads the addresses of a recurrent network's weights, which fake tensors have not, so the call is made
here as in `aten/src/ATen/native/cudnn/RNN.cpp`. No buffer of all weights is handed in: the operator makes
one. A result with the batch first is a view with the steps first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten
_MODES: Mapping[Any, int] = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: 2, torch.gru: 3}
"""The numbers by which cuDNN knows them."""
_TAKEN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_BATCH_FIRST = 10


def is_for_cudnn(function: object, args: Sequence[Any]) -> bool:
    """Whether a call is one of cuDNN's; rows of several lengths are not looked at."""
    if function not in _MODES or not isinstance(args[2], list | tuple):
        return False
    tensor = args[0]
    return (
        torch.backends.cudnn.enabled
        and tensor.device.type == "cuda"
        and tensor.dtype in _TAKEN
        and tensor.numel() > 0
    )


def keeps_dropout_state(args: Sequence[Any]) -> bool:
    """Whether it drops something between layers: the state of that is cuDNN's own, in the process."""
    _, _, _, _, layers, dropout, training, *_ = args
    return bool(training and dropout > 0 and layers > 1)


def by_cudnn(function: Callable[..., Any], *args: Any) -> Any:
    """What the call gives: results of all steps, and last states."""
    tensor, hidden, weights, has_biases, layers, dropout, training, is_double, batch_first = args
    states, cells = hidden if function is torch.lstm else (hidden, None)
    width = states.shape[2] if cells is None else cells.shape[2]
    projected = states.shape[2] if width != states.shape[2] else 0
    each = (4 if has_biases else 2) + (projected > 0)
    sizes = (_MODES[function], width, projected, layers, batch_first)
    rest: tuple[Any, ...] = (dropout, training, is_double, [], None)
    given = aten._cudnn_rnn.default(tensor, list(weights), each, None, states, cells, *sizes, *rest)
    return given[:3] if cells is not None else given[:2]


def recurrent_laid_out(args: tuple[Any, ...], result: Any) -> Any:
    """The result with its steps first in memory, and the buffer of weights, of which there is one now."""
    output, *states, buffer = result
    if args[_BATCH_FIRST]:
        output = _steps_first(output)
    if buffer is None:
        buffer = args[0].new_empty(sum(weight.numel() for weight in args[1]))
    return output, *states, buffer


def recurrent_backward(
    tensor: Tensor, weights: list[Tensor], _each: int, _buffer: Tensor, states: Tensor, cells: Any, *rest: Any
) -> tuple[Any, ...]:
    """Gradients of what they are asked for: of the input, both states, and all weights."""
    batch_first, wanted = rest[8], rest[-1]
    first = tensor.new_empty(tensor.shape) if wanted[0] else None
    if first is not None and batch_first:
        first = _steps_first(first)
    of_cells = cells.new_empty(cells.shape) if cells is not None and wanted[2] else None
    of_weights = [weight.new_empty(weight.shape) for weight in weights] if wanted[3] else []
    return first, states.new_empty(states.shape) if wanted[1] else None, of_cells, of_weights


def _steps_first(tensor: Tensor) -> Tensor:
    batch, steps, *width = tensor.shape
    return tensor.new_empty((steps, batch, *width)).transpose(0, 1)


def normalized(
    tensor: Tensor,
    _weight: Any,
    _bias: Any,
    mean: Tensor,
    variance: Tensor,
    _momentum: float,
    _epsilon: float,
) -> tuple[Tensor, ...]:
    """A batch that was normalised, what is kept for its backward, and the new statistics."""
    result = torch.empty_like(tensor, memory_format=suggest_memory_format(tensor))
    reserve = tensor.new_empty(0, dtype=torch.uint8)
    saved, new = [(torch.empty_like(mean), torch.empty_like(variance)) for _ in range(2)]
    return (result, *saved, reserve, *new)
