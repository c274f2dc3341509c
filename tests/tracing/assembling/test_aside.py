"""What a run does beside a program."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whence


class Aside(nn.Module):
    """Holds a value while another layer runs, and makes two that nobody reads: one of them is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        held = self.first(x)
        copied, _ = held + 1, held.t()
        x = self.second(held * 2)
        del held, copied
        return x


def test_what_is_aside_of_a_program() -> None:
    """The graph has what computes and reads tensors, by its name; what is held has where it ends."""
    said = whence.capture(Aside(), (torch.randn(2, 4),), backward=torch.sum).circumstances
    assert said.unread is not None
    assert [node.name for node in said.unread.graph.nodes if node.op == "call_function"] == ["add"]
    assert said.held["addmm"] == ("addmm", "addmm_1") and said.held["add"] == ("mul", "addmm_1")


def test_a_program_that_runs_nothing() -> None:
    """All that is computed is needed for no result."""
    program = whence.capture(_returns_its_argument, (torch.randn(2, 4),))
    said = program.circumstances
    assert said.unread is not None and said.held == {} and program.memory().peak == 2 * 4 * 4


def _returns_its_argument(x: Tensor) -> Tensor:
    held = x + 1
    return x if held.ndim else held


def test_a_program_that_runs_all_has_nothing_aside() -> None:
    """And neither have its copies."""
    program = whence.capture(nn.Linear(4, 4), (torch.randn(2, 4),), backward=torch.sum)
    for each in (program, program.decompose()):
        assert each.circumstances.unread is None and each.circumstances.held == {}
