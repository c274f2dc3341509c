"""What a kernel takes for itself is what it took when it ran."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from whence._torch.observe.kernel_memory import KernelMemory, Layout, is_profiling, run_on_zeros

aten = torch.ops.aten
CPU = torch.device("cpu")


def layout(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Layout:
    """Without gaps."""
    return Layout(shape, torch.empty(shape, device="meta").stride(), dtype, device)


def test_results_and_what_is_there_beside_them() -> None:
    """A kernel that computes in its result needs nothing more."""
    assert run_on_zeros(aten.relu.default, (layout(6, 4),), {}) == KernelMemory((96,), 0)
    unfolds = run_on_zeros(aten.im2col.default, (layout(1, 3, 8, 8), [3, 3], [1, 1], [0, 0], [1, 1]), {})
    assert unfolds is not None and unfolds.results == (3 * 9 * 36 * 4,)
    sorts = run_on_zeros(aten.median.default, (layout(100),), {})
    assert sorts is not None and sorts.beside >= 100 * 4


def test_layouts_are_those_of_the_originals() -> None:
    """Views, tensors that are spread out over one number, and empty ones."""
    for original in (
        torch.zeros(4, 6).t(),
        torch.zeros(4, 1).expand(4, 6),
        torch.zeros(0, 3),
        torch.zeros(()),
    ):
        given = Layout(tuple(original.shape), original.stride(), original.dtype, original.device)
        assert given.zeros().stride() == original.stride() and torch.equal(given.zeros(), original)


def test_what_must_not_run_does_not() -> None:
    """Kernels of other devices, and those that would read what a fake kernel left empty."""
    assert run_on_zeros(aten.relu.default, (layout(6, 4, device=torch.device("cuda")),), {}) is None
    assert run_on_zeros(aten.relu.default, (layout(0, dtype=torch.uint8),), {}) is None


@pytest.mark.canary("torch.autograd._profiler_enabled")
def test_a_profiler_of_somebody_else_is_seen() -> None:
    """While it runs."""
    with profile(activities=[ProfilerActivity.CPU]):
        assert is_profiling()
    assert not is_profiling()
