"""Operators that update all parameters at once."""

from typing import Any

import pytest
import torch

from whence._torch.elsewhere.fused import FUSED, updated
from whence._torch.elsewhere.target import Twins, spelled

aten = torch.ops.aten
_NUMBERS: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
_OF_SGD = {**_NUMBERS, "nesterov": False, "maximize": False, "is_first_step": False}


@pytest.mark.parametrize(("operator", "count"), [(aten._fused_sgd.default, 3), (aten._fused_sgd_.default, 0)])
def test_what_is_updated_is_like_what_is_given(operator: Any, count: int) -> None:
    """One list for each that is written; nothing where that happens in place."""
    elsewhere = spelled("cuda")
    assert elsewhere is not None
    twins = Twins(elsewhere)
    lists = [[twins.of(torch.ones(2, 3).t()), twins.of(torch.ones(4))] for _ in range(3)]
    assert operator in FUSED
    found = updated(twins.mode, operator, tuple(lists), _OF_SGD) or ()
    assert len(found) == count
    for made in found:
        assert [(each.shape, each.stride(), each.device) for each in made] == [
            (each.shape, each.stride(), each.device) for each in lists[0]
        ]
