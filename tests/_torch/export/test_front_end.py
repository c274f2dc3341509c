"""The front end keeps nothing of a model."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whence._torch.export.front_end import kept_by_nobody


class Scaled(nn.Module):
    """A layer, and a buffer."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) * self.factor
        return found


@pytest.mark.canary("torch._dynamo.functional_export")
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_was_read_goes() -> None:
    """With its weights, and what was exported runs."""
    model, x = Scaled(), torch.ones(2, 4)
    expected = model(x)
    alive: list[weakref.ref[Any]] = [weakref.ref(held) for held in (model, *model.parameters())]
    with kept_by_nobody(model):
        exported = torch.export.export(model, (x,), strict=True)
    assert torch.equal(exported.module()(x), expected)
    del model, exported, expected
    gc.collect()
    assert [each() for each in alive if each() is not None] == []
