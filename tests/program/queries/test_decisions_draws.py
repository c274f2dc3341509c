"""Random numbers are part of what a program takes in."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

import whence

X = torch.randn(3, 4)


class Drawing(nn.Module):
    """Draws in a module, by itself, and in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x) + torch.rand_like(x)
        return torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: x.sin(), (x,))


def test_draws_are_listed() -> None:
    """In order, branches included, with call, line and what is drawn; the page and plain data have them."""
    program = whence.capture(Drawing(), (X,))
    first, second, third = program.draws
    assert (str(first.call), first.phase, first.operation) == ("drop", "forward", "aten.dropout.default")
    assert second.source is not None and second.source.function == "Drawing.forward"
    assert "rand_like" in third.operation and program.draws == tuple(dict.fromkeys(program.draws))
    assert f"  in   random    {first.node}: f32[3, 4]  aten.dropout.default  drop" in str(program)
    assert len(json.loads(program.to_json())["draws"]) == 3


def test_nothing_is_drawn() -> None:
    """Dropout draws nothing where the model is not trained."""
    assert whence.capture(Drawing().drop.eval(), (X,)).draws == ()
    attention = torch.nn.functional.scaled_dot_product_attention
    assert whence.capture(attention, (X[None], X[None], X[None])).draws == ()
    assert len(whence.capture(attention, (X[None],) * 3, {"dropout_p": 0.1}).draws) == 1
