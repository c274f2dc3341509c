"""Kernels in Python for operators whose C++ kernel takes numbers only.

PyTorch has such kernels for its python dispatcher, and a capture with symbols needs it. Those of resampling
and of recurrent networks compute otherwise than eager does, in other steps and so with other last bits. Here
are kernels that call what eager calls; PyTorch's own come back when the capture is over
(`record/symbolic_dispatch.py`). Those of recurrent cells work in place, on pieces of one tensor: a kernel
gives other last bits on a piece than on a copy of it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp.decompositions import lstm_impl, upsample_compute_output_size
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.nn.functional import linear

from whence._torch.sizes.symbols import comes_from_data, comparable, without_decisions

if TYPE_CHECKING:
    from whence._torch.sizes.environment import SizeEnvironment


Weights = Sequence[Tensor | None]
"""Of the inputs and of the hidden state, then the biases of both, None where there are none."""
Cell = Callable[[Tensor, Any, Weights], Any]
"""The next state, from what the inputs' weights made of a step and from the state before."""
_INPUT_SIZE = 2
SymbolRule = Callable[[Any, tuple[Any, ...], dict[str, Any], "SizeEnvironment | None"], Any]
"""What an operator gives on arguments with open sizes; the choice of a real kernel decides nothing."""


def as_it_lies(tensor: Tensor, *_options: Any) -> Tensor:
    """Other memory, laid out as the tensor's."""
    return tensor.new_empty_strided(tensor.shape, tensor.stride())


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
    rows = _layer_weights(params, 2, has_biases=options[0])
    results, ends = _stacked(cell, inputs, hidden.unbind(0), rows, options[1:])
    return results, torch.stack(ends)


def lstm(
    inputs: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What `torch.lstm` gives where no layer runs in oneDNN: all results, last hidden states and cells."""
    projects = hidden[0].shape[2] != hidden[1].shape[2]
    rows = _layer_weights(params, 3 if projects else 2, has_biases=options[0])
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


def _layer_weights(params: Sequence[Tensor], matrices: int, *, has_biases: bool) -> list[Weights]:
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


aten = torch.ops.aten
_LSTM = 2
"""How oneDNN numbers the kinds of recurrent networks."""
_BY_ROOT, _BY_COUNT = 1, 2
"""How Fourier transforms number what they divide by."""


def resampled(operator: Any) -> Callable[..., Tensor]:
    """`operator` with its output size computed from scale factors, as the C++ kernel does it."""

    def kernel(tensor: Tensor, output_size: Any, *options: Any) -> Tensor:
        *flags, factors = options
        size = upsample_compute_output_size(tensor.size(), output_size, factors)
        scales = factors or [None] * len(size)
        return operator(tensor, size, *flags, *scales)  # type: ignore[no-any-return]

    return kernel


def lstm_in_layers(tensor: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], *options: Any) -> Any:
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


def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """Dropout in eager's steps, with eager's random numbers."""
    if not train or p == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    if tensor.device.type != "cpu":
        return torch.native_dropout(tensor, p, train)[0]
    return tensor * torch.empty_like(tensor).bernoulli_(1 - p).div_(1 - p)


def inverse_stft(
    spectrum: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    *options: Any,
) -> Tensor:
    """`torch.istft` in eager's steps, which says nothing of a window that adds up to zero somewhere.

    PyTorch's kernel in Python leaves out a copy that lies otherwise in the backward, and adds up the window
    for each row of a batch: the gradients of the spectrum and of the window have other last bits.
    """
    rest: list[Any] = [*options, *(True, False, None, None, False)[len(options) :]]
    center, normalized, onesided, length, return_complex = rest
    hop, frames, frequencies = hop_length or n_fft // 4, spectrum.shape[-1], spectrum.shape[-2]
    is_half = frequencies != n_fft if onesided is None else onesided
    torch._check(frequencies == (n_fft // 2 + 1 if is_half else n_fft))
    pairs = torch.view_as_real(spectrum.resolve_conj())
    rows = torch.view_as_complex((pairs if spectrum.dim() == 3 else pairs.unsqueeze(0)).transpose(1, 2))
    weights = _window(spectrum, window, win_length or n_fft, n_fft)
    norm = _BY_ROOT if normalized else _BY_COUNT
    if return_complex:
        found = aten._fft_c2c(rows, [2], norm, forward=False)
    else:
        found = aten._fft_c2r(rows if is_half else rows[..., : n_fft // 2 + 1], [2], norm, n_fft)
    whole = n_fft + hop * (frames - 1)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else whole - start
    summed = aten.unfold_backward(found * weights.view([1, 1, n_fft]), [rows.shape[0], whole], 1, n_fft, hop)
    envelope = aten.unfold_backward(weights.pow(2).expand([1, frames, n_fft]), [1, whole], 1, n_fft, hop)
    signal = summed[:, start:end] / envelope[:, start:end]
    signal = signal if spectrum.dim() == 3 else signal.squeeze(0)
    return F.pad(signal, [0, end - whole]) if end > whole else signal


def _window(spectrum: Tensor, window: Tensor | None, length: int, n_fft: int) -> Tensor:
    """Ones where there is none, between zeros where it is shorter than a frame."""
    if window is None:
        window = torch.ones(length, dtype=spectrum.real.dtype, device=spectrum.device)
    left = (n_fft - length) // 2
    return window if length == n_fft else F.pad(window, [left, n_fft - length - left])


def filled_diagonal(tensor: Tensor, value: Any, wrap: bool = False) -> Tensor:
    """In place; with `wrap` a diagonal begins anew below the columns of a matrix, one row further down."""
    if tensor.ndim == 2:
        tensor.diagonal().fill_(value)
    else:
        _along_diagonal(tensor, tensor.shape[0], 0).fill_(value)
    if wrap and tensor.ndim == 2 and tensor.shape[0] > tensor.shape[1] + 1:
        height, step = tensor.shape[0], tensor.shape[1] + 1
        rest = (height * (step - 1) + step - 1) // step - (step - 1)
        _along_diagonal(tensor, rest, step).fill_(value)
    return tensor


def _along_diagonal(tensor: Tensor, size: int, row: int) -> Tensor:
    """What lies along the diagonal that begins in a row."""
    first = tensor.storage_offset() + tensor.stride(0) * row
    return tensor.as_strided((size,), (sum(tensor.stride()),), first)


def stepwise(operator: Any, cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    """A recurrent network step by step on the CPU; elsewhere PyTorch's kernel."""
    elsewhere = operator.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def kernel(inputs: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if inputs.device.type != "cpu":
            return elsewhere(inputs, *rest)  # type: ignore[no-any-return]
        return recurrent(cell, inputs, *rest)

    return kernel


def convolution(tensor: int, weight: int, transposed: int, groups: int) -> SymbolRule:
    """The positions of the input, the weight, whether it is transposed, and the groups.

    Fake convolutions ask for the backend to know the memory format of the result: oneDNN is not taken for a
    batch below 16. Which kernel runs is chosen anew in every run, by the program as by eager, so the question
    is not to limit sizes. What the operator really requires of sizes is required here.
    """

    def rule(
        func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: "SizeEnvironment | None"
    ) -> Any:
        kernel = args[weight]
        taken = kernel.shape[0] if args[transposed] else kernel.shape[1] * args[groups]
        torch._check(args[tensor].shape[1] == taken)
        with without_decisions(environment):
            return func(*args, **kwargs)

    return rule


def resampling_backward(
    _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], environment: "SizeEnvironment | None"
) -> Any:
    """It has no fake kernel for symbols; its result has the size of an argument."""
    with without_decisions(environment):
        layout = suggest_memory_format(args[0])
        size = args[_INPUT_SIZE]
        return torch.empty(size, dtype=args[0].dtype, device=args[0].device, memory_format=layout)


def like(argument: int) -> SymbolRule:
    """It has no fake kernel; its result is as this argument, contiguous."""

    def rule(
        _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], _environment: "SizeEnvironment | None"
    ) -> Any:
        return torch.empty_like(args[argument], memory_format=torch.contiguous_format)

    return rule


def squeezed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _environment: "SizeEnvironment | None"
) -> Any:
    """A size of 1 is no dimension of the result: how many it has is asked, which PyTorch leaves open."""
    tensor, *chosen = args
    dims = range(tensor.dim()) if not chosen else chosen[0] if isinstance(chosen[0], list | tuple) else chosen
    sizes = [tensor.shape[dim] for dim in dims if -tensor.dim() <= dim < tensor.dim()]
    for size in sizes:
        bool(comes_from_data(size) or size == 1)
    return func(*args, **kwargs)


def attention_on_cpu(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: "SizeEnvironment | None"
) -> Any:
    """For an empty sequence eager takes another kernel; this one divides by its length: the process ends."""
    if environment is not None:
        environment.require_filled(*(tensor.shape[-2] for tensor in args[:2]))
    return func(*args, **kwargs)


def write_in_place(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: "SizeEnvironment | None"
) -> Any:
    """Whether what is written to overlaps with itself is not to be asked."""
    with _overlap_undecided(args, environment):
        return func(*args, **kwargs)


@cache
def writes_in_place(func: Any) -> bool:
    """Whether an operator writes what belongs at each place to its first argument."""
    written = func._schema.is_mutable and func._schema.name.endswith("_")
    return written and (func is aten.copy_.default or torch.Tag.pointwise in func.tags)


def _overlap_undecided(
    args: tuple[Any, ...], environment: "SizeEnvironment | None"
) -> AbstractContextManager[Any]:
    """Decides nothing where all tensors have the same sizes; otherwise some are broadcast to the first."""
    sizes = {comparable(value.shape) for value in args if isinstance(value, Tensor)}
    return without_decisions(environment) if len(sizes) == 1 else nullcontext()


def chosen(choice: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """One of two, also where bytes choose: PyTorch's fake kernel takes none."""
    found: Tensor = aten.where.self(choice.bool() if choice.dtype is torch.uint8 else choice, one, other)
    return found


def observed(tensor: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Numbers rounded as quantised ones, which of them were in range, and the statistics: by channel, these
    are made when there are none yet."""
    given = aten._fused_moving_avg_obs_fq_helper_functional.default(tensor, *args)
    lowest, axis, by_channel = args[2], args[9], len(args) > 10 and args[10]
    if not by_channel or lowest.numel() > 0:
        return tuple(given)
    return (*given[:2], *(each.new_empty(tensor.shape[axis]) for each in given[2:]))
