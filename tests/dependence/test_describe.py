"""What is expected in the place of a callable: the function behind it, and what it is called with."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.ones(2, 2)


class Scaled(nn.Module):
    """Multiplies by what it asks of a callable that it holds."""

    def __init__(self, ask: Callable[..., Any], *given: Any) -> None:
        super().__init__()
        self.ask, self.given = ask, given

    def forward(self, x: Tensor) -> Any:
        return x * int(self.ask(*self.given))


METHODS_IN_C = {
    "of a text": (Scaled("1{}".format, 2), Scaled("2{}".format, 2)),
    "of a row": (Scaled([1, 2].__getitem__, 0), Scaled([3, 2].__getitem__, 0)),
    "of a dictionary": (Scaled({0: 1}.get, 0), Scaled({0: 2}.get, 0)),
    "of a number": (Scaled((1).__add__, 2), Scaled((2).__add__, 2)),
    "with arguments": (
        Scaled(functools.partial("12".replace, "1", "3")),
        Scaled(functools.partial("11".replace, "1", "3")),
    ),
}


@pytest.mark.parametrize(("model", "other"), METHODS_IN_C.values(), ids=METHODS_IN_C)
def test_methods_in_c_are_those_of_what_they_are_bound_to(
    model: Scaled, other: Scaled, tmp_path: Path
) -> None:
    """Another that is bound to its like is the same, also where a file was read; one of another is not."""
    program = whence.capture(model, (X,))
    program.save(tmp_path / "scaled.whence")
    for checked in (program, whence.load(tmp_path / "scaled.whence", model=model)):
        assert checked.check(model, (X,)) == []
        assert checked.check(other, (X,)) != []
    assert not torch.equal(model(X), other(X))
