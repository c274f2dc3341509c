"""What notebooks show is small, and whatever is in it is text."""

from __future__ import annotations

from typing import Any

import torch

from tests.viewer.reading import HOSTILE, Elements, Named
from whence import capture
from whence.program.queries.notebook import opening_html


def test_all_that_prints_as_a_page_opens_to_it() -> None:
    """A line that opens, of the same elements whatever modules are called."""
    for name in ("first", HOSTILE):
        model, args = Named(name), (torch.randn(3, 4),)
        program = capture(model, args, backward=lambda y: y.sum())
        shown: list[Any] = [
            program,
            program.calls,
            program.signature,
            program.report(),
            program.verify(model, args),
            program.cost(),
            program.memory(),
            program.guards,
            program.diff(program.decompose("core")),
            program.decompose("core").history,
        ]
        for each in shown:
            text = each._repr_html_()
            assert [tag for tag, _ in Elements(text).tags] == ["details", "summary", "code", "pre"]
            assert HOSTILE not in text


def test_of_a_long_page_the_beginning_is_shown() -> None:
    """And how much more there is."""
    text = opening_html("a line", "\n".join(map(str, range(100))))
    assert "59\n… and 40 more lines" in text
    assert "more lines" not in opening_html("a line", "one\ntwo")


def test_of_a_long_line_the_beginning_is_shown() -> None:
    """Whatever is captured, what a notebook keeps of it is small."""
    program = capture(lambda x: torch.stack([x] * 5000), (torch.ones(1),))
    assert len(str(program)) > 15_000 > 2_000 > len(program._repr_html_())
    assert len(opening_html("x" * 9_000, "\n".join(["y" * 9_000] * 100))) < 26_000
