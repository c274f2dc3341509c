"""Random numbers are part of what a program takes in."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
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


def test_draws_are_in_the_signature(tmp_path: Path) -> None:
    """In order, branches included, with call, line, generator; in text, plain data and files, beside the rows
    of placeholders and returned values, which stay one each."""
    program = whence.capture(Drawing(), (X,))
    signature = program.signature
    first = signature.draws[0]
    assert signature.draws == program.draws and first.generator == "torch.cpu" and first.library == "torch"
    assert str(signature).splitlines()[-3:] == [f"  in   random    {draw}" for draw in signature.draws]
    placeholders = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert [row.name for row in signature.inputs] == placeholders
    assert json.loads(program.to_json())["draws"][0]["generator"] == "torch.cpu"
    program.save(tmp_path / "drawing.whence")
    assert whence.load(tmp_path / "drawing.whence").signature.draws == signature.draws


def test_draws_follow_what_passes_make() -> None:
    """They are read off the graph of the program that the signature is of."""
    program = whence.capture(Drawing().drop, (X,))
    lowered = program.decompose()
    assert [row.operation for row in program.signature.draws] == ["aten.dropout.default"]
    assert [row.operation for row in lowered.signature.draws] == ["aten.bernoulli.p"]


def test_who_draws_is_said() -> None:
    """Torch, Python or NumPy, with the generator."""

    def noisy(x: Tensor) -> Tensor:
        if random.random() + np.random.rand() < 2.0:
            x = x + torch.rand(4)
        return x

    draws = whence.capture(noisy, (X,), decide="example").signature.draws
    assert [(row.library, row.generator) for row in draws] == [
        ("random", "random"),
        ("numpy", "numpy.random"),
        ("torch", "torch.cpu"),
    ]


def test_draws_are_listed() -> None:
    """In order, branches included, with call, line and what is drawn; the page and plain data have them."""
    program = whence.capture(Drawing(), (X,))
    first, second, third = program.draws
    assert (str(first.call), first.phase, first.operation) == ("drop", "forward", "aten.dropout.default")
    assert second.source is not None and second.source.function == "Drawing.forward"
    assert "rand_like" in third.operation and program.draws == tuple(dict.fromkeys(program.draws))
    assert f"  in   random    {first.node}: f32[3, 4]  aten.dropout.default  drop  from torch.cpu" in str(
        program
    )
    assert len(json.loads(program.to_json())["draws"]) == 3


def test_nothing_is_drawn() -> None:
    """Dropout draws nothing where the model is not trained."""
    assert whence.capture(Drawing().drop.eval(), (X,)).draws == ()
    attention = torch.nn.functional.scaled_dot_product_attention
    assert whence.capture(attention, (X[None], X[None], X[None])).draws == ()
    assert len(whence.capture(attention, (X[None],) * 3, {"dropout_p": 0.1}).draws) == 1
