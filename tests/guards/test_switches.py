"""What code asks of the process is guarded where it asks, and there alone."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.ones(2)
LOGGER = logging.getLogger("tests.guards.switches")


@contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    LOGGER.setLevel(logging.ERROR)
    yield
    LOGGER.setLevel(logging.NOTSET)


ASKED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]] = {
    "number of threads": (lambda x: x * torch.get_num_threads(), _threads),
    "levels of loggers": (lambda x: x * 2 if LOGGER.isEnabledFor(logging.WARNING) else x * 3, _quiet),
    "working directory": (lambda x: x * len(os.getcwd()), lambda: chdir("/")),  # noqa: PTH109
}


@pytest.mark.parametrize("what", ASKED)
def test_what_code_asks_by_name(what: str) -> None:
    """It is a guard of what asks; for what does not, it may be anything."""
    function, around = ASKED[what]
    program, other = whence.capture(function, (X,)), whence.capture(torch.sin, (X,))
    assert program.check(function, (X,)) == []
    with around():
        assert [violation.guard.what for violation in program.check(function, (X,))] == [what]
        assert other.check(torch.sin, (X,)) == []


def test_files_are_named(tmp_path: Path) -> None:
    """Nobody looks again at what code has read of a file; that is said."""
    file = tmp_path / "scale.txt"
    file.write_text("2.0")

    def scaled(x: Tensor) -> Tensor:
        return x * float(file.read_text())

    guards = whence.capture(scaled, (X,)).guards
    assert "files at which code looks (read_text)" in [row.what for row in guards.unguarded]
    assert not any(row.what.startswith("files") for row in whence.capture(torch.sin, (X,)).guards.unguarded)


class Attends(nn.Module):
    """Layers that PyTorch makes of others, by the grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.dropout(self.norm(x), training=False)
        heads = self.linear(normed).unflatten(-1, (2, 4)).transpose(-2, -3)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize("captured", [True, False])
def test_a_program_of_whole_composites_holds_in_every_grad_mode(captured: bool) -> None:
    """Each run takes them apart as eager does; where the graph has their parts, they are of one mode."""
    model, x = Attends(), torch.randn(2, 5, 8)
    with torch.set_grad_enabled(captured):
        program = whence.capture(model, (x,))
        lowered, own = program.decompose(), program.decompose({torch.ops.aten.mul.Tensor: torch.mul})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = whence.capture(model, (x,))
    guarded = program.guarded(model)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert program.check(model, (x,)) == own.check(model, (x,)) == []
            assert torch.equal(guarded(x), model(x)) and guarded(x).requires_grad is torch.is_grad_enabled()
    with torch.set_grad_enabled(not captured):
        assert [row.guard.what for row in lowered.check(model, (x,))] == ["grad mode"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert [row.guard.what for row in cast.check(model, (x,))] == ["grad mode"]
    with torch.set_grad_enabled(captured):
        assert lowered.check(model, (x,)) == []
