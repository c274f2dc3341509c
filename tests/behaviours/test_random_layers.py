"""Whatever repeated modules do to each other, they give one program with and without reuse."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

import whence
from tests.behaviours.test_random_modules import FEW, total
from tests.hierarchy.random_modules import WIDTH, Built, Recipe, recipes
from tests.sameness import differences


class Repeated(nn.Module):
    """Several modules of one recipe, with a connection around each."""

    def __init__(self, recipe: Recipe, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Built(recipe) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The last result."""
        for layer in self.layers:
            result = layer(x)
            x = x + (result[0] if isinstance(result, tuple) else result)
        return x


def outcome(model: nn.Module, x: Tensor, backward: Any, *, reuse: bool) -> whence.Program | str:
    """The program, or what stood against it."""
    try:
        return whence.capture(model, (x,), backward=backward, reuse=reuse)
    except whence.CaptureError as error:
        return f"{type(error).__name__}: {error.what}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("backward", [False, True, total], ids=["forward", "tangents", "loss"])
@pytest.mark.random
@FEW
@given(recipe=recipes())
def test_random_layers(backward: Any, recipe: Recipe) -> None:
    """One program, or one error."""
    torch.manual_seed(0)
    model, x = Repeated(recipe), torch.randn(3, WIDTH, requires_grad=True)
    plain = outcome(deepcopy(model), x, backward, reuse=False)
    reused = outcome(deepcopy(model), x, backward, reuse=True)
    if isinstance(plain, str) or isinstance(reused, str):
        assert plain == reused
        return
    assert differences(plain, reused) == {}
