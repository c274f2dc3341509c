"""Canaries: the memory layouts of kernels, real and fake."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from whence._torch.layouts import as_kernel_lays_out, has_layout_rule

aten = torch.ops.aten
INPUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(5, 3, 4, 2).permute(3, 1, 2, 0),
    "three dimensions": lambda: torch.randn(2, 4, 3).transpose(1, 2),
}


def batch_norm_arguments(x: Tensor) -> tuple[object, ...]:
    return (x, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)


@pytest.mark.canary("torch._prims_common.suggest_memory_format")
@pytest.mark.parametrize("layout", INPUTS)
def test_batch_norm_is_laid_out_as_by_the_kernel(layout: str) -> None:
    """After the correction the fake result of batch norm has the strides of the real one."""
    target, x = aten.native_batch_norm.default, INPUTS[layout]()
    real = target(*batch_norm_arguments(x))
    mode = FakeTensorMode()
    arguments = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in batch_norm_arguments(x)]
    with mode:
        corrected = as_kernel_lays_out(target, tuple(arguments), target(*arguments))
    assert corrected[0].stride() == real[0].stride()


def test_memory_format_is_contiguous_or_channels_last() -> None:
    """`suggest_memory_format` knows these two, and takes a permutation for contiguous."""
    formats = [suggest_memory_format(make()) for make in INPUTS.values()]
    assert formats == [
        torch.contiguous_format,
        torch.channels_last,
        torch.contiguous_format,
        torch.contiguous_format,
    ]


def test_other_operators_are_left_alone() -> None:
    """An operator without a rule keeps its fake result."""
    result = torch.ones(2)
    assert not has_layout_rule(aten.mm.default)
    assert as_kernel_lays_out(aten.mm.default, (), result) is result
