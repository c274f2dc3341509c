"""Decisions by values are data of the program."""

from typing import Any

import torch
from torch import Tensor, nn

import whence


class Drawn(nn.Module):
    """Decides by an input, and by a coin."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin() if x.sum() > 0 else x.cos()
        return x * 2 if torch.rand([]) < 2 else x


def test_decisions_say_who_asked_what() -> None:
    """With the line, the call and the answer; what is drawn says so."""
    program = whence.capture(nn.Sequential(Drawn()), (torch.ones(2),), decide="example")
    first, second = program.decisions
    assert (first.asked, first.answer, first.drawn) == ("gt", True, False)
    assert (second.asked, second.answer, second.drawn) == ("lt", True, True)
    assert str(first.call) == "0" and first.source is not None
    assert first.source.function == "Drawn.forward"
    assert str(second).startswith("lt is True, drawn at random: in 0, at ")
    assert program.node(first.node).target.__name__ == "stays"  # type: ignore[union-attr]


def test_decisions_are_plain_data() -> None:
    """In the JSON of a program."""
    program = whence.capture(nn.Sequential(Drawn()), (torch.ones(2),), decide="example")
    row: dict[str, Any] = program.to_dict()["decisions"][1]
    assert {key: row[key] for key in ("call", "asked", "answer", "drawn")} == {
        **{"call": "0", "asked": "lt"},
        **{"answer": True, "drawn": True},
    }


def test_a_program_without_any() -> None:
    """Nothing decided."""
    assert whence.capture(nn.Linear(2, 2), (torch.ones(2),), decide="example").decisions == ()
