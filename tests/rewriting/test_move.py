"""A program moves to another device or dtype as a module does, or says why it cannot."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import whence

X = torch.randn(5, 4)


class Doing(nn.Module):
    """A layer, a buffer and a plain tensor, used by a function."""

    def __init__(self, run: Callable[["Doing", Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.norm, self.run = nn.Linear(4, 4), nn.BatchNorm1d(4), run
        self.scale, self.plain = nn.Buffer(torch.rand(4)), torch.rand(4)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


MOVES: dict[str, Callable[[Doing, Tensor], Any]] = {
    "layers": lambda m, x: F.dropout(m.norm.eval()(m.linear(x)).relu(), 0.2),
    "parts": lambda m, x: m.linear(x).split(2, 1),
    "dtypes that it names": lambda m, x: m.linear(x).softmax(-1, dtype=torch.float32) * m.scale,
    "factories": lambda m, x: m.linear(x) + torch.arange(4) + torch.zeros(4) + x.new_ones(4),
    "numbers": lambda m, x: m.linear(x) * 0.1 + torch.tensor([0.5, 0.1, 0.2, 0.3]),
    "plain tensor": lambda m, x: m.linear(x) * m.plain,
    "attention": lambda m, x: F.scaled_dot_product_attention(
        m.linear(x)[None], x[None], x[None], is_causal=True
    ),
    "masks": lambda m, x: m.linear(x).masked_fill(x > 0, -1e9).topk(2),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_another_dtype(name: str, dtype: torch.dtype) -> None:
    """It is what a capture of the moved model gives: the same bits, nothing stale, the same operations."""
    model = Doing(MOVES[name])
    program = whence.capture(model, (X,))
    moved, other, x = program.to(dtype), deepcopy(model).to(dtype), X.to(dtype)
    assert moved.verify(other, (x,)).ok
    assert moved.check(other, (x,)) == []
    again = whence.capture(other, (x,))
    assert moved.diff(again).ok
    assert [row.value.dtype for row in moved.signature.inputs] == [
        row.value.dtype for row in again.signature.inputs
    ]
    assert program.verify(model, (X,)).ok
    assert program.check(model, (X,)) == []


def test_open_sizes_stay_open() -> None:
    """And a file holds the program as it is after the move."""
    program = whence.capture(Doing(MOVES["layers"]), (X,), dynamic_shapes=({0: Dim.DYNAMIC},)).to(
        torch.float64
    )
    for rows in (5, 9):
        assert program.unflatten()(torch.randn(rows, 4).double()).shape == (rows, 4)
    with pytest.raises(whence.CallError, match="f64"):
        program.module()(X)


def test_a_file_of_a_moved_program(tmp_path: Path) -> None:
    """It is stored with its new dtype."""
    model = Doing(MOVES["parts"]).double()
    program = whence.capture(Doing(MOVES["parts"]), (X,)).to(torch.float64)
    program.save(tmp_path / "moved.whence")
    loaded = whence.load(tmp_path / "moved.whence", model=model)
    assert all(map(torch.equal, loaded.module()(X.double()), model(X.double())))


def test_another_device() -> None:
    """Devices in the graph go along."""
    run: Callable[[Doing, Tensor], Any] = lambda m, x: m.linear(x) + torch.zeros(4, device=x.device)  # noqa: E731
    program = whence.capture(Doing(run), (X,)).to("meta", torch.float64)
    result = program.module()(X.to("meta", torch.float64))
    assert (result.device.type, result.dtype) == ("meta", torch.float64)
    assert {held.device.type for held in program.state.values()} == {"meta"}
    assert {node.meta["val"].device.type for node in program.graph.nodes if node.op != "output"} == {"meta"}


REFUSED: dict[str, tuple[Callable[[Doing, Tensor], Any], dict[str, Any], torch.dtype, str]] = {
    "asked": (
        lambda m, x: m.linear(x).to(x.dtype),
        {},
        torch.float64,
        r"test_move.py:\d+(.|\n)*model.to\(torch",
    ),
    "asked by torch": (
        lambda m, x: F.multi_head_attention_forward(
            *(x, x, x, 4, 2, torch.ones(12, 4), None, None, None, False, 0.0, m.linear.weight, m.linear.bias),
            attn_mask=torch.ones(5, 5, dtype=torch.bool),
        )[0],
        {},
        torch.float64,
        "asks for the dtype",
    ),
    "cast": (lambda m, x: m.linear(x).float(), {}, torch.float64, r"or casts one"),
    "cast to another": (lambda m, x: m.linear(x).to(m.scale), {}, torch.float64, r"or casts one"),
    "written": (lambda m, x: m.norm(m.linear(x)), {}, torch.bfloat16, "running_mean is torch.bfloat16 there"),
    "joint": (lambda m, x: m.linear(x), {"backward": True}, torch.float64, "with a backward"),
    "no floating point": (lambda m, x: m.linear(x), {}, torch.int64, "no floating point dtype"),
    "branches": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (m.linear(x),)),
        {},
        torch.float64,
        "inside of branches",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_moved_says_why(name: str) -> None:
    """Nothing is guessed: what would be another graph is refused."""
    run, options, dtype, words = REFUSED[name]
    program = whence.capture(Doing(run), (X,), **options)
    with pytest.raises(whence.UsageError, match=words):
        program.to(dtype)


def test_autocast_and_graphs_of_others_are_refused() -> None:
    """What chose the casts is not asked again."""
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        program = whence.capture(model, (X,))
    with pytest.raises(whence.UsageError, match="autocast"):
        program.to(torch.float64)
    read = whence.from_exported_program(torch.export.export(model, (X,)))
    with pytest.raises(whence.UsageError, match="nobody saw"):
        read.to(torch.float64)
