"""Kernels for symbols: PyTorch's come back, and ours compute in eager's steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._decomp.decompositions import lstm_impl, upsample_compute_output_size
from torch._dispatch.python import enable_python_dispatcher

import whence
from whence._torch.operators.table import said_of
from whence._torch.record.symbolic_dispatch import kernels_for_symbols

aten = torch.ops.aten


def test_pytorch_has_kernels_in_python() -> None:
    """The python dispatcher runs what operators keep in `py_kernels`, and remembers that in a cache."""
    assert aten.lstm.input.py_kernels[DispatchKey.CompositeImplicitAutograd] is lstm_impl
    assert upsample_compute_output_size(torch.Size((1, 1, 4, 4)), None, [2.0, 2.0]) == [8, 8]
    with enable_python_dispatcher():
        assert isinstance(aten.lstm.input._dispatch_cache, dict)


@pytest.mark.canary(
    "torch._dispatch.python.enable_python_dispatcher", "torch._ops.OpOverload._dispatch_cache"
)
def test_kernels_come_back() -> None:
    """Inside the block other kernels are there, afterwards those of before."""
    before = dict(aten.upsample_bilinear2d.vec.py_kernels)
    with kernels_for_symbols(wanted=True):
        assert dict(aten.upsample_bilinear2d.vec.py_kernels) != before
        assert DispatchKey.Autograd not in aten.upsample_bilinear2d.default.py_kernels
    assert dict(aten.upsample_bilinear2d.vec.py_kernels) == before
    assert DispatchKey.Autograd in aten.upsample_bilinear2d.default.py_kernels


@pytest.mark.parametrize("batch", [1, 3, 7])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, partial(nn.RNN, nonlinearity="relu")])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
)
def test_recurrent_networks_compute_what_eager_computes(
    kind: Callable[..., nn.RNNBase], options: dict[str, Any], batch: int
) -> None:
    """Results and gradients of networks whose hidden size fills no register."""
    torch.manual_seed(0)
    network, x = kind(4, 5, **options), torch.randn(6, batch, 4, requires_grad=True)
    wanted = [x, *network.parameters()]

    def run() -> list[Tensor]:
        results, last = network(x)
        return [results, last, *torch.autograd.grad(results.square().sum() + last.sin().sum(), wanted)]

    expected = run()
    with kernels_for_symbols(wanted=True):
        found = run()
    assert all(map(torch.equal, found, expected))


def test_recurrent_networks_drop_between_layers() -> None:
    """As eager does, with the same random numbers."""
    network, x = nn.GRU(4, 5, num_layers=3, dropout=0.5), torch.randn(6, 3, 4)
    torch.manual_seed(1)
    expected, _ = network(x)
    torch.manual_seed(1)
    with kernels_for_symbols(wanted=True):
        found, _ = network(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"proj_size": 3}, {"bias": False}, {"bidirectional": True, "batch_first": True}]
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_lstms_compute_what_eager_computes(options: dict[str, Any], dtype: torch.dtype) -> None:
    """In oneDNN or cell by cell, with dropout between layers: results, gradients and random numbers."""
    torch.manual_seed(0)
    network = nn.LSTM(4, 5, num_layers=2, dropout=0.5, **options).to(dtype)
    x = torch.randn(6, 3, 4, dtype=dtype, requires_grad=True)
    wanted = [x, *network.parameters()]

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        results, (last, cells) = network(x)
        loss = results.square().sum() + last.sin().sum() + cells.sum()
        return [results, last, cells, *torch.autograd.grad(loss, wanted), torch.get_rng_state()]

    expected = run()
    with kernels_for_symbols(wanted=True):
        found = run()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.15, 0.5, 1.0])
def test_dropout_is_eagers(p: float, dtype: torch.dtype) -> None:
    """The same numbers are drawn and multiplied."""
    x = torch.randn(40, 3, dtype=dtype, requires_grad=True)

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        dropped = torch.dropout(x, p, train=True)
        return [dropped, *torch.autograd.grad(dropped.square().sum(), x), torch.get_rng_state()]

    expected = run()
    with kernels_for_symbols(wanted=True):
        found = run()
    assert all(map(torch.equal, found, expected))


def test_recurrent_networks_elsewhere_are_pytorchs() -> None:
    """Another device has other kernels in eager mode, too."""
    network, x = nn.GRU(4, 5, device="meta"), torch.randn(6, 3, 4, device="meta")
    with kernels_for_symbols(wanted=True):
        assert network(x)[0].shape == (6, 3, 5)


@pytest.mark.canary(
    "torch._C._get_mkldnn_enabled", "torch._decomp.decompositions.upsample_compute_output_size"
)
def test_kernels_compute_what_eager_computes() -> None:
    """An LSTM and a resampling give eager's bits."""
    lstm = torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True)
    x, image = torch.randn(3, 5, 4), torch.randn(2, 3, 5, 5)
    expected, (hidden, _) = lstm(x)
    resized = torch.nn.functional.interpolate(image, scale_factor=1.7, mode="bilinear")
    with kernels_for_symbols(wanted=True):
        found, (last, _) = lstm(x)
        again = torch.nn.functional.interpolate(image, scale_factor=1.7, mode="bilinear")
    assert torch.equal(found, expected)
    assert torch.equal(last, hidden)
    assert torch.equal(again, resized)


SIGNAL = torch.Generator().manual_seed(0)
SPECTRA: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "half": ((3, 5, 17), {"n_fft": 8, "hop_length": 2}),
    "one row": ((5, 17), {"n_fft": 8}),
    "whole": ((2, 8, 9), {"n_fft": 8, "hop_length": 3, "normalized": True}),
    "complex": ((2, 8, 9), {"n_fft": 8, "hop_length": 1, "onesided": False, "return_complex": True}),
    "short window": ((2, 5, 9), {"n_fft": 8, "hop_length": 2, "win_length": 6}),
    "cut": ((2, 5, 9), {"n_fft": 8, "hop_length": 2, "center": False, "length": 15}),
    "whole as half": ((2, 8, 9), {"n_fft": 8, "hop_length": 2, "onesided": False}),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_signals_come_back_from_spectra_as_eagers(name: str) -> None:
    """Results, and the gradients of spectrum and window, bit for bit."""
    shape, options = SPECTRA[name]
    length = options.get("win_length", options["n_fft"])
    window = (torch.rand(length, generator=SIGNAL) + 0.5).requires_grad_()
    values = torch.view_as_complex(torch.randn(*shape, 2, generator=SIGNAL))
    spectrum = values.mT.contiguous().mT.requires_grad_()

    def run() -> list[Tensor]:
        found = torch.istft(spectrum, window=window, **options)
        real = torch.view_as_real(found) if found.is_complex() else found
        return [found, *torch.autograd.grad(real.sin().sum(), [spectrum, window])]

    expected = run()
    with kernels_for_symbols(wanted=True):
        found = run()
    assert all(map(torch.equal, found, expected))


FILLED = [(3, 3), (6, 3), (3, 6), (4, 4, 4)]


@pytest.mark.parametrize("shape", FILLED)
@pytest.mark.parametrize("wrap", [False, True])
def test_diagonals_are_filled_as_eagers(shape: tuple[int, ...], wrap: bool) -> None:
    """Also of what lies transposed."""
    numbers = torch.randn(*shape, generator=SIGNAL)
    for given in (numbers, numbers.transpose(0, 1).contiguous().transpose(0, 1)):
        expected = given.clone().fill_diagonal_(2.0, wrap)
        with kernels_for_symbols(wanted=True):
            found = given.clone().fill_diagonal_(2.0, wrap)
        assert torch.equal(found, expected)


class Contrasting(nn.Module):
    """A loss over a batch leaves out what is compared to itself."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).fill_diagonal_(-torch.inf).log_softmax(-1)


@pytest.mark.parametrize("backward", [False, True])
def test_a_filled_diagonal_stays_open(backward: bool) -> None:
    """A batch of another size is captured with it; it ended in PyTorch's RuntimeError."""
    model, x = Contrasting(), torch.randn(4, 3, requires_grad=backward)
    shapes = ({0: torch.export.Dim("rows", min=2)},)
    program = whence.capture(model, (x,), backward=backward, dynamic_shapes=shapes)
    assert program.verify(model, (torch.randn(7, 3, requires_grad=backward),)).ok


class Choosing(nn.Module):
    """Whole numbers choose, as bytes."""

    def forward(self, x: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(choice, x.tanh(), x / 2), torch.where(choice, x.t().sin().t(), 0.0)


@pytest.mark.filterwarnings("ignore:where received a uint8 condition tensor")
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_bytes_choose(backward: bool, is_open: bool) -> None:
    """Also in the backward, and for open sizes; it ended in PyTorch's "expected predicate to be bool".

    Choosing by other whole numbers is eager's error.
    """
    shapes = ({0: torch.export.Dim("rows", min=2)},) * 2 if is_open else None
    x, choice = torch.randn(4, 3, requires_grad=backward), torch.arange(12).view(4, 3) % 2
    program = whence.capture(Choosing(), (x, choice.byte()), backward=backward, dynamic_shapes=shapes)
    rows = 7 if is_open else 4
    others = torch.randn(rows, 3, requires_grad=backward), torch.arange(rows * 3).view(rows, 3).byte() % 2
    assert program.verify(Choosing(), others).ok
    with pytest.raises(RuntimeError, match="expected"):
        whence.capture(Choosing(), (x, choice))


AS_EAGER = frozenset(
    {
        "aten::_upsample_lanczos2d_aa.vec",  # its overload without scale factors has no kernel for symbols
        *("aten::broadcast_tensors", "aten::empty.out", "aten::matmul", "aten::matmul.out", "aten::one_hot"),
        *("aten::pad_sequence", "aten::stft.center", "aten::unsafe_chunk"),
        "aten::tensor_split.tensor_indices_or_sections",
        *("aten::hardshrink", "aten::softshrink", "aten::native_batch_norm"),
        *("aten::miopen_batch_norm", "aten::to_dense"),
        *("aten::gru.data", "aten::lstm.data", "aten::rnn_relu.data", "aten::rnn_tanh.data"),
    }
)
"""PyTorch's kernels in Python that compute in eager's steps, and those of packed sequences."""


def test_pytorchs_other_kernels_are_known() -> None:
    """What the python dispatcher would run in the place of C++ is ours, or has been compared with eager."""
    keys = {DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd}
    packets = [getattr(aten, name) for name in dir(aten)]
    operators = [
        getattr(packet, name)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
    ]
    with kernels_for_symbols(wanted=True):
        found = {
            each.name()
            for each in operators
            if any(
                said_of(each).kernel is not kernel for key, kernel in each.py_kernels.items() if key in keys
            )
        }
    assert found <= AS_EAGER
