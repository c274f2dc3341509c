"""Gradients that a function's own backward accumulates are gradients of a program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import differing
from tests.tracing.reversible import reversible, rows


def _loss(result: Tensor) -> Tensor:
    return result.sin().sum()


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_reversible_network_is_captured(trained: bool, reuse: bool) -> None:
    """The program and the tree give eager's gradients; those that the model has of before stay."""
    model, eager = reversible(), reversible()
    if trained:
        _loss(model(rows(7))).backward()
    before = _gradients(model)
    program = whence.capture(model, (rows(),), backward=_loss, reuse=reuse)
    assert program.verify(model, (rows(),)).ok
    assert all(now is before[name] for name, now in _gradients(model).items())
    _loss(eager(rows())).backward()
    tree = program.unflatten(copy=True)
    tree.zero_grad()
    tree(rows())[0].backward()
    assert not differing(_gradients(tree), _gradients(eager))


def test_it_stays_open() -> None:
    """The same where the number of rows varies."""
    shapes = ({0: torch.export.Dim("rows", min=2)},)
    program = whence.capture(reversible(), (rows(),), backward=_loss, dynamic_shapes=shapes)
    assert program.verify(reversible(), (rows(9),)).ok


def test_gradients_of_both_kinds_are_refused() -> None:
    """Nothing tells in which order eager mode adds them up."""
    with pytest.raises(whence.SideEffect, match=r"writes the gradients of blocks\.0\.second\.weight"):
        whence.capture(reversible(used_again=True), (rows(),), backward=_loss)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.aside, self.used = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x).sum().backward()
        result: Tensor = self.used(x)
        return result


def test_a_backward_of_the_forward_is_refused() -> None:
    """What it fills is not of the backward of the program."""
    with pytest.raises(whence.SideEffect, match=r"writes the gradients of aside\.weight, aside\.bias"):
        whence.capture(Inner(), (rows(),), backward=_loss)
