"""A tensor that is written keeps its strides: other strides give later operations other last bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import verified
from tests.sameness import differences
from tests.tracing.writing import BACKWARD, Bodies, Body, Writer, sines

LENGTH, FEATURES, PIECE = 5, 6, 8
RECURRENT = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
bodies = Bodies()


def _wide(m: Writer, x: Tensor) -> Tensor:
    """A value of 24 columns that a gradient reaches."""
    return m.linear(x[:, :8]).repeat(1, 3)


@bodies.add
def chain_on_a_piece(m: Writer, x: Tensor) -> Tensor:
    return _wide(m, x)[:, :8].add_(x.chunk(3, 1)[0]).sigmoid_()


@bodies.add
def chain_on_a_piece_and_its_base(m: Writer, x: Tensor) -> Tensor:
    whole = m.linear(x[:, :8])
    piece = whole[:, :5]
    piece.add_(x[:, :5]).tanh_()
    return torch.cat([piece.sigmoid(), whole.tanh()], 1)


@bodies.add
def chain_on_a_piece_of_a_piece(m: Writer, x: Tensor) -> Tensor:
    piece = _wide(m, x).view(-1, 2, 12)[:, 1]
    inner = piece[:, 2:9]
    inner.mul_(0.3).add_(x[:, :7]).sigmoid_()
    return inner.tanh() + piece[:, :7].tanh()


@bodies.add
def chain_on_a_piece_that_is_no_view(m: Writer, x: Tensor) -> Tensor:
    first, second, _ = torch.unsafe_split(_wide(m, x), 8, 1)
    return first.add_(second).mul_(0.7).sigmoid_()


@bodies.add
def copy_into_a_transposed_tensor(m: Writer, x: Tensor) -> Tensor:
    turned = torch.zeros(24, x.shape[0]).t()
    turned.copy_(_wide(m, x))
    return turned.exp_().sum(1) + turned.sigmoid().sum()


@bodies.add
def copy_through_a_transpose(m: Writer, x: Tensor) -> Tensor:
    whole = torch.zeros(24, x.shape[0])
    whole.t().copy_(_wide(m, x))
    return whole.exp_().sum(0) + whole.sigmoid().sum()


@bodies.add
def slopes_drawn_for_a_transposed_tensor(m: Writer, x: Tensor) -> Tensor:
    drawn = functional.rrelu(_wide(m, x).t(), training=True)
    return drawn.square().sum() + drawn.exp().sum(0)


@bodies.add
def result_in_a_piece(m: Writer, x: Tensor) -> Tensor:
    whole = torch.zeros(x.shape[0], 24)
    with torch.no_grad():
        torch.add(x[:, :8], 1, out=whole[:, :8])
        whole[:, 8:16].sigmoid_().tanh_()
    return m.linear(whole[:, :8].tanh()) * whole[:, 8:16].tanh()


@bodies.add
def chain_without_gradients(m: Writer, x: Tensor) -> Tensor:
    piece = m.linear(x[:, :8])[:, :5]
    with torch.no_grad():
        piece.mul_(2).sigmoid_()
    return piece.tanh()


@bodies.add
def checkpointed_noise_on_a_piece(m: Writer, x: Tensor) -> Any:
    def part(y: Tensor) -> Tensor:
        piece = (y * 2)[:, :8]
        return nn.functional.dropout(piece.mul_(2), 0.5, inplace=True).sigmoid()

    return checkpoint(part, _wide(m, x), use_reentrant=False)


@bodies.parametrize()
def test_a_chain_of_writes(body: Body, mode: str) -> None:
    """Outputs, gradients and state are eager's bits where what is written has strides of its own."""
    torch.manual_seed(0)
    verified(Writer(body), torch.randn(7, 24), backward=BACKWARD[mode])


@pytest.mark.sample(8)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize("rows", [2, 7, 16])
@pytest.mark.parametrize("hidden", [8, 16])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_networks(kind: str, hidden: int, rows: int, backward: bool) -> None:
    """PyTorch's recurrent cells write their gates in place, in pieces of one product."""
    torch.manual_seed(rows)
    model = RECURRENT[kind](FEATURES, hidden, batch_first=True)
    verified(model, torch.randn(rows, LENGTH, FEATURES), backward=sines if backward else False)


class Gated(nn.Module):
    """Writes in place to pieces of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(PIECE, 3 * PIECE)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = torch.unsafe_chunk(self.linear(x), 3, 1)
        return first.add_(second).sigmoid_() * third.tanh_()


class Stack(nn.Module):
    """Equal modules, of which a capture runs the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
def test_repeated_modules(backward: bool) -> None:
    """A module that is written from a record is the one that ran, and its tree computes eager's bits."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(7, PIECE)
    program = verified(model, x, backward=sines if backward else False)
    again = whence.capture(model, (x,), backward=sines if backward else False, reuse=False)
    assert program.replay
    assert not differences(program, again)
    assert torch.equal(program.unflatten()(x) if not backward else model(x), model(x))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
def test_sizes_that_vary(backward: bool) -> None:
    """The program computes eager's bits at other sizes."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(7, PIECE)
    loss = sines if backward else False
    program = whence.capture(model, (x,), backward=loss, dynamic_shapes={"x": {0: Dim("rows", max=64)}})
    for rows in (2, 7, 16, 33):
        result = program.verify(model, (torch.randn(rows, PIECE),))
        assert result.ok, (rows, str(result))


def test_nothing_is_added_where_strides_agree() -> None:
    """A result that lies in memory as what it replaces is read as it is."""

    def forward(m: Writer, x: Tensor) -> Tensor:
        hidden = m.linear(x).add_(1)
        hidden[0].mul_(2)
        return hidden.t().mul_(3).sigmoid_()

    torch.manual_seed(0)
    program = verified(Writer(forward), torch.randn(4, 8))
    scatters = [node for node in program.graph.nodes if node.target is torch.ops.aten.slice_scatter.default]
    assert scatters == []
