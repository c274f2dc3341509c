"""Canaries: TorchScript's objects."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from whence._torch.scripting import is_packed_weight, is_scripted


def traced() -> Any:
    with pytest.warns(DeprecationWarning):
        return torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2), check_trace=False)


def traced_function() -> Any:
    with pytest.warns(DeprecationWarning):
        return torch.jit.trace(torch.relu, torch.ones(1, 2), check_trace=False)


@pytest.mark.parametrize(
    "make", [traced, lambda: traced().forward, traced_function], ids=["module", "method", "function"]
)
def test_scripted_things_are_told_apart(make: Callable[[], Any]) -> None:
    """A scripted module, its methods (`torch._C.ScriptMethod`) and a scripted function are known as such."""
    assert is_scripted(make())


@pytest.mark.parametrize("value", [nn.Linear(2, 2), nn.Linear(2, 2).forward, torch.relu, 3])
def test_other_things_are_not(value: object) -> None:
    """Ordinary modules, methods and functions are not scripted."""
    assert not is_scripted(value)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_packed_weight_is_told_apart() -> None:
    """A packed quantised weight is a `ScriptObject` whose `_type` says so."""
    weight = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    assert is_packed_weight(torch.ops.quantized.linear_prepack(weight, None))
    assert not is_packed_weight(weight)
