"""Canaries for what an operation is made of."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from whence._torch.operators import decompositions as decomposing
from whence._torch.operators.decompositions import Autocast, decomposition_of

aten = torch.ops.aten


def test_operations_are_taken_apart_on_this_thread() -> None:
    """What a composite does is seen below autograd, by a TorchDispatchMode that is gone afterwards."""
    assert issubclass(decomposing._OperationLog, TorchDispatchMode)
    value = torch.empty(2, 4, device="meta")
    operations, result = decomposition_of(lambda: aten.linear.default(value, value.new_empty(3, 4)), [value])
    assert [str(row.target) for row in operations][-2:] == ["aten.t.default", "aten.mm.default"]
    assert result is operations[-1].result
    assert dispatch._get_current_dispatch_mode_stack() == []


def test_casts_of_autocast_are_seen() -> None:
    """Inside a region the casts are operations like others."""
    region = Autocast("cpu", torch.bfloat16, True, None)
    value = torch.empty(4, 4, device="cpu")
    operations, result = decomposition_of(lambda: aten.mm.default(value, value), [value], [region])
    assert [str(row.target) for row in operations] == [
        "aten._to_copy.default",
        "aten._to_copy.default",
        "aten.mm.default",
    ]
    assert result.dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_table_is_followed_to_the_end() -> None:
    """What a function of the table calls is looked up in the table, too."""
    table: dict[Any, Any] = {
        aten.hardsigmoid.default: lambda x: aten.hardtanh(x + 3.0, 0.0, 6.0) / 6.0,
        aten.hardtanh.default: aten.clamp.default,
    }
    with FakeTensorMode() as mode:
        value = mode.from_tensor(torch.ones(2))
    operations, _ = decomposition_of(lambda: aten.hardsigmoid.default(value), [value], table=table)
    assert [row.target for row in operations] == [aten.add.Tensor, aten.clamp.default, aten.div.Tensor]


def test_factories_make_fakes() -> None:
    """What a function makes of nothing is as fake as its arguments."""
    with FakeTensorMode() as mode:
        value = mode.from_tensor(torch.ones(2))
    _, result = decomposition_of(lambda: value + torch.arange(2), [value])
    assert isinstance(result, FakeTensor)
