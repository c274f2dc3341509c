"""What a module keeps from a capture, and a program will not make again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.ones(3, 4)


class Table(nn.Module):
    """Has the name of a buffer, which its first call fills."""

    cache: Tensor | None

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.assigns = assigns
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            made = torch.arange(4.0)
            if self.assigns:
                self.cache = made
            else:
                self.register_buffer("cache", made)
        assert self.cache is not None
        return x + self.cache


@pytest.mark.parametrize("assigns", [True, False])
def test_a_buffer_that_the_first_call_fills_is_told(assigns: bool) -> None:
    """It is no state of the program, which leaves it as it was; once it is there, all is eager's."""
    model = Table(assigns=assigns)
    with pytest.warns(UserWarning, match=r"Table kept tensors .* in cache .*: run the model once before"):
        program = whence.capture(model, (X,))
    assert model.cache is None
    assert [row.name for row in program.verify(model, (X,)).rows if not row.equal] == ["cache"]
    model(X)
    assert whence.capture(model, (X,)).verify(model, (X,)).ok
