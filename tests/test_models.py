import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import MODEL_CASES, ModelCase


def train_once(
    row: ModelCase, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor | None]:
    """The loss and every gradient, by name."""
    torch.manual_seed(2)
    loss = row.loss(model(*args, **kwargs))
    loss.backward()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": loss.detach(),
        **gradients,
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
    }


def is_same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


@pytest.mark.parametrize("row", MODEL_CASES, ids=lambda row: row.name)
def test_case_computes_the_same_bits_twice(row: ModelCase) -> None:
    """A copy run from the same seed has the loss and the gradients of the original."""
    original = row.make()
    duplicate = copy.deepcopy(original)
    first, second = train_once(row, *original), train_once(row, *duplicate)
    assert first.keys() == second.keys()
    assert [name for name in first if not is_same(first[name], second[name])] == []
