"""What operations are besides their phase: of the loss, computed again, saved, drawn."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import whence
from tests.program.small import sine_loss
from tests.tracing.steps.small import batch, small, zero_first

X = torch.randn(3, 4)


class Marked(nn.Module):
    """A dropout, and a checkpoint around a layer and a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = partial(checkpoint, lambda h: self.second(h).tanh(), use_reentrant=False)
        return self.drop(self.first(x)) + inner(x)


@pytest.fixture(scope="module")
def program() -> whence.Program:
    torch.manual_seed(0)
    return whence.capture(Marked(), (X,), backward=sine_loss)


def operators(program: whence.Program, pattern: str) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in program.select(pattern)]


def test_the_loss(program: whence.Program) -> None:
    """What computes it from the results of the model, and not what the model computes."""
    assert operators(program, ":: loss") == ["sin.default", "sum.default"]


def test_the_loss_of_a_function() -> None:
    """No module says where a function ends: what its results need is its own."""
    program = whence.capture(lambda x: x.cos(), (X.clone().requires_grad_(),), backward=sine_loss)
    assert operators(program, ":: loss") == ["sin.default", "sum.default"]


def test_sizes_are_not_of_the_loss() -> None:
    """What it is divided by is computed from sizes alone."""
    program = whence.capture(
        nn.Linear(4, 4),
        (torch.randn(6, 4),),
        backward=lambda y: y.square().sum() / (2 * y.shape[0] + 1),
        dynamic_shapes=({0: Dim("rows", min=2)},),
    )
    assert any(node.target is torch.ops.aten.sym_size.int for node in program.graph.nodes)
    assert operators(program, ":: loss") == ["pow.Tensor_Scalar", "sum.default", "div.Tensor"]


def test_the_loss_of_a_step() -> None:
    """Where the backward of a step begins."""
    model, optimizer = small()
    program = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    found = program.select(":: loss")
    assert found and all(program.where(node).phase == "forward" for node in found)
    assert not any(program.where(node).calls for node in found)


def test_a_loss_inside_the_model() -> None:
    """The value itself is of the loss, whoever computed it."""

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    program = whence.capture(Own(4, 4), (X,), backward=lambda value: value)
    assert operators(program, ":: loss") == ["mean.default"]


def test_what_is_computed_again(program: whence.Program) -> None:
    """All that a checkpoint runs in the backward, and nothing else."""
    found = program.select(":: recomputed")
    assert all(program.where(node).recomputed for node in found)
    assert program.select("second :: recomputed") and len(found) < len(program.select(":: backward"))


def test_what_is_saved(program: whence.Program) -> None:
    """Values of the forward that the backward reads are those that `memory` counts, and views of state."""
    saved = {node.name for node in program.select(":: saved")}
    assert {row.node for row in program.memory().kept} <= saved
    assert all(program.where(name).phase == "forward" for name in saved)
    assert program.node("sum_1").name not in saved  # of which the seed reads the shape


def test_what_is_drawn(program: whence.Program) -> None:
    """The operation that draws, and not what is made of it."""
    assert operators(program, "drop :: random") == ["bernoulli.p"]


def test_what_nothing_is() -> None:
    """A forward program without dropout has nothing of the kind, and the error says so."""
    program = whence.capture(nn.Linear(4, 4), (X,))
    for mark in ("loss", "recomputed", "saved", "random"):
        with pytest.raises(whence.SelectionError, match=f"nothing that is {mark} fits"):
            program.select(f":: {mark}")


def test_a_mark_elsewhere(program: whence.Program) -> None:
    """It says that there are others."""
    with pytest.raises(whence.SelectionError) as caught:
        program.select("first :: random")
    assert caught.value.why == "1 operations are random, none of them here"
