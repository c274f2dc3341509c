"""What optimizers ask before they take many tensors at once."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from whence._torch.elsewhere.groups import grouped_as_there
from whence._torch.elsewhere.recorder import told
from whence._torch.elsewhere.target import Twins, spelled

pytestmark = pytest.mark.canary(
    *("torch._C._group_tensors_by_device_and_dtype", "torch.optim.optimizer._foreach_supported_types"),
    *("torch.utils._foreach_utils", "torch.utils._foreach_utils._foreach_supported_types"),
)


def test_fakes_are_grouped_by_the_device_that_they_say() -> None:
    """With counts that stay on the CPU beside them, and the numbers of their places."""
    elsewhere = spelled("cuda:1")
    assert elsewhere is not None
    twins = Twins(elsewhere)
    weights: list[Any] = [twins.of(nn.Parameter(torch.ones(2))), twins.of(torch.ones(2, dtype=torch.float16))]
    counts: list[Any] = [torch.tensor(1.0), torch.tensor(1.0)]
    with told(elsewhere):
        found = _group_tensors_by_device_and_dtype([weights, counts], with_indices=True)
        taken = _has_foreach_support(weights[1:], weights[0].device)
        assert _default_to_fused_or_foreach(weights, differentiable=False) == (False, True)
    device = torch.device("cuda", 1)
    assert {key: rows[1] for key, rows in found.items()} == {
        (device, torch.float32): [0],
        (device, torch.float16): [1],
    }
    assert taken


def test_real_tensors_are_grouped_as_ever() -> None:
    """Those of other threads, too."""
    tensors: list[Any] = [torch.ones(2), torch.ones(2, device="meta"), torch.ones(3)]
    before = _group_tensors_by_device_and_dtype([tensors], with_indices=True)
    with grouped_as_there():
        now = _group_tensors_by_device_and_dtype([tensors], with_indices=True)
    assert {key: rows[1] for key, rows in now.items()} == {key: rows[1] for key, rows in before.items()}
