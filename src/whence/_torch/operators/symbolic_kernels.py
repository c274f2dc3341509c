"""Kernels in Python for operators whose C++ kernel takes numbers only.

PyTorch has such kernels for its python dispatcher, and a capture with symbols needs it. Those of resampling
and of recurrent networks compute otherwise than eager does, in other steps and so with other last bits. Here
are kernels that call what eager calls, in `recurrent_cells` those of a network's cells; PyTorch's own come
back when the capture is over. They are put in place for the process, where only threads that trace look.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp.decompositions import lstm_impl, upsample_compute_output_size
from torch._dispatch.python import enable_python_dispatcher

from whence._torch.operators.recurrent_cells import Cell, gru_cell, lstm, recurrent, simple_cell

aten = torch.ops.aten
_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
_LSTM = 2
"""How oneDNN numbers the kinds of recurrent networks."""


def _resampled(operator: Any) -> Callable[..., Tensor]:
    """`operator` with its output size computed from scale factors, as the C++ kernel does it."""

    def kernel(tensor: Tensor, output_size: Any, *options: Any) -> Tensor:
        *flags, factors = options
        size = upsample_compute_output_size(tensor.size(), output_size, factors)
        scales = factors or [None] * len(size)
        return operator(tensor, size, *flags, *scales)  # type: ignore[no-any-return]

    return kernel


def _lstm(tensor: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], *options: Any) -> Any:
    """An LSTM in eager's steps: one oneDNN layer for each layer and direction, or cell by cell."""
    _, layers, dropout, train, bidirectional, batch_first = options
    if tensor.device.type != "cpu":
        return lstm_impl(tensor, hidden, params, *options)
    if not _runs_in_onednn(tensor, hidden, params):
        return lstm(tensor, hidden, params, *options)
    value = (tensor.transpose(0, 1) if batch_first else tensor).contiguous()
    directions = 2 if bidirectional else 1
    last: list[Any] = []
    for layer in range(layers):
        rows = range(layer * directions, (layer + 1) * directions)
        results = [_layer(value, hidden, params, row, directions, options) for row in rows]
        last += results
        value = torch.cat([result[0] for result in results], -1) if bidirectional else results[0][0]
        if dropout and train and layer < layers - 1:
            value = torch.dropout(value, dropout, train=True)
    value = value.transpose(0, 1) if batch_first else value
    return value, torch.stack([row[1] for row in last]), torch.stack([row[2] for row in last])


def _layer(
    value: Tensor,
    hidden: Sequence[Tensor],
    params: Sequence[Tensor],
    row: int,
    directions: int,
    options: Sequence[Any],
) -> Any:
    has_biases, layers, _, train, bidirectional, batch_first = options
    count = 4 if has_biases else 2
    weights = list(params[row * count : (row + 1) * count])
    if not has_biases:
        weights += [torch.zeros_like(weight) for weight in weights]
    kind = (_LSTM, hidden[0].shape[2], layers, has_biases, bidirectional, batch_first, train)
    return aten.mkldnn_rnn_layer.default(
        value, *weights, hidden[0][row], hidden[1][row], row % directions == 1, [], *kind
    )


def _runs_in_onednn(tensor: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Whether eager takes oneDNN's layers: numbers that it computes with, on the CPU, no projection."""
    same_width = hidden[0].shape[2] == hidden[1].shape[2]
    here = all(row.device.type == "cpu" for row in (tensor, *hidden, *params))
    return bool(same_width and here and _computes_with(tensor.dtype) and torch._C._get_mkldnn_enabled())


def _computes_with(dtype: torch.dtype) -> bool:
    onednn = torch.ops.mkldnn
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(onednn._is_mkldnn_bf16_supported())
        case torch.float16:
            return not torch.is_grad_enabled() and bool(onednn._is_mkldnn_fp16_supported())
    return False


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """Dropout in eager's steps, with eager's random numbers."""
    if not train or p == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    if tensor.device.type != "cpu":
        return torch.native_dropout(tensor, p, train)[0]
    return tensor * torch.empty_like(tensor).bernoulli_(1 - p).div_(1 - p)


def _stepwise(operator: Any, cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    """A recurrent network step by step on the CPU; elsewhere PyTorch's kernel."""
    elsewhere = operator.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def kernel(inputs: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if inputs.device.type != "cpu":
            return elsewhere(inputs, *rest)  # type: ignore[no-any-return]
        return recurrent(cell, inputs, *rest)

    return kernel


_RESAMPLED = [
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
]
_KERNELS: dict[Any, Callable[..., Any] | None] = {
    **{getattr(aten, name).vec: _resampled(getattr(aten, name).default) for name in _RESAMPLED},
    **{getattr(aten, name).default: None for name in _RESAMPLED},
    aten.dropout.default: _dropout,
    aten.lstm.input: _lstm,
    aten.gru.input: _stepwise(aten.gru.input, gru_cell),
    aten.rnn_tanh.input: _stepwise(aten.rnn_tanh.input, partial(simple_cell, torch.tanh)),
    aten.rnn_relu.input: _stepwise(aten.rnn_relu.input, partial(simple_cell, torch.relu)),
}
"""What runs instead of PyTorch's kernel in Python; None for the C++ kernel, which takes symbols."""


@contextmanager
def kernels_for_symbols(wanted: bool) -> Iterator[None]:
    """Inside the block operators that take numbers only run as kernels in Python that take symbols."""
    if not wanted:
        yield
        return
    before = {operator: dict(operator.py_kernels) for operator in _KERNELS}
    try:
        for operator, kernel in _KERNELS.items():
            _replace(operator, dict.fromkeys(_KEYS, kernel) if kernel is not None else {})
        with enable_python_dispatcher():
            yield
    finally:
        for operator, kernels in before.items():
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _replace(operator: Any, kernels: dict[Any, Any]) -> None:
    for key in _KEYS:
        operator.py_kernels.pop(key, None)
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()
