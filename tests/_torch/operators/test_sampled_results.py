"""Results found on numbers in the place of symbols are those of PyTorch's fake kernels, and of eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from whence._torch.operators.sampled_results import Samples
from whence._torch.sizes.symbols import (
    comparable,
    environment_of,
    mode_for_sizes,
    sized_like,
    undecided_bookkeeping,
)

aten = torch.ops.aten
Case = Callable[[Tensor, Tensor], tuple[Any, tuple[Any, ...]]]

KNOWN: dict[str, Case] = {
    "unary": lambda x, _: (aten.neg.default, (x,)),
    "permuted": lambda x, _: (aten.exp.default, (x.transpose(1, 2),)),
    "part": lambda x, _: (aten.neg.default, (x[..., :3],)),
    "scalar": lambda x, _: (aten.mul.Tensor, (x, 2.5)),
    "promoted": lambda x, y: (aten.add.Tensor, (x, y)),
    "broadcast": lambda x, _: (aten.mul.Tensor, (x, x[:1])),
    "fewer dimensions": lambda x, _: (aten.add.Tensor, (x, x[0, 0])),
    "outer": lambda x, _: (aten.le.Tensor, (x[:, :, :1], x[:, :1])),
    "permuted and not": lambda x, _: (aten.mul.Tensor, (x.transpose(1, 2), x.transpose(1, 2).contiguous())),
    "no dimensions": lambda x, _: (aten.where.self, (x > 0, x.new_zeros(()), x.new_ones(()))),
    "comparison": lambda x, y: (aten.eq.Tensor, (x, y)),
    "cumulated": lambda x, _: (aten.cumsum.default, (x, 1)),
    "softmax": lambda x, _: (aten._softmax.default, (x, 2, False)),
    "mean": lambda x, _: (aten.mean.dim, (x, [2], True)),
    "sum": lambda x, _: (aten.sum.dim_IntList, (x, [1])),
    "index": lambda x, y: (aten.index.Tensor, (x, [None, y[0, :, 0].clamp(0, 1)])),
}
UNKNOWN: dict[str, Case] = {
    "sizes that may differ": lambda x, _: (aten.add.Tensor, (x[0], x[:, 0])),
    "random": lambda x, _: (aten.bernoulli.default, (x,)),
    "view": lambda x, _: (aten.view.default, (x, [-1])),
    "several results": lambda x, _: (aten.max.dim, (x, 1)),
    "fixed sizes": lambda _x, _y: (aten.neg.default, (torch.zeros(2),)),
    "steps in no order": lambda x, _: (aten.neg.default, (x.as_strided((x.shape[0], 4), (2, 7)),)),
    "keywords": lambda x, _: (aten.sum.dim_IntList, (x, [1])),
}


def fakes(mode: Any, example: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """The tensors with a batch and a length that are symbols."""
    environment = environment_of(mode)
    assert environment is not None
    batch, length = (environment.base(name, value, 1, None) for name, value in (("b", 3), ("n", 5)))
    x, y = (sized_like(mode, tensor, (batch, length, 4)) for tensor in (example, whole))
    return x, y


def examples() -> tuple[Tensor, Tensor]:
    """A tensor of floats and one of whole numbers."""
    return torch.randn(3, 5, 4), torch.randint(0, 3, (3, 5, 4))


@pytest.mark.parametrize("name", KNOWN)
def test_result_is_that_of_the_fake_kernel(name: str) -> None:
    """Shape, strides, dtype and device, spelled over the same symbols; and nothing is decided."""
    mode = mode_for_sizes(vary=True)
    samples = Samples(mode)
    environment = environment_of(mode)
    assert environment is not None
    with undecided_bookkeeping(wanted=True), mode:
        func, args = KNOWN[name](*fakes(mode, *examples()))
        decided = len(environment.guards)
        found = samples.result(func, args, {})
        assert len(environment.guards) == decided
        expected = func(*args)
    assert isinstance(found, FakeTensor)
    assert comparable(found.shape) == comparable(expected.shape)
    assert comparable(found.stride()) == comparable(expected.stride())
    assert (found.dtype, found.device) == (expected.dtype, expected.device)


@pytest.mark.parametrize("name", KNOWN)
def test_eager_has_this_layout(name: str) -> None:
    """At the sizes of the example."""
    mode = mode_for_sizes(vary=True)
    real = examples()
    with undecided_bookkeeping(wanted=True), mode:
        func, args = KNOWN[name](*fakes(mode, *real))
        found = Samples(mode).result(func, args, {})
    func, args = KNOWN[name](*real)
    expected = func(*args)
    assert found is not None
    assert tuple(map(int, found.shape)) == tuple(expected.shape)
    assert tuple(map(int, found.stride())) == expected.stride()
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_rest_is_left_to_pytorch(name: str) -> None:
    """Where the sizes of the result are not clear, nothing is said."""
    mode = mode_for_sizes(vary=True)
    kwargs = {"dtype": torch.float64} if name == "keywords" else {}
    with undecided_bookkeeping(wanted=True), mode:
        func, args = UNKNOWN[name](*fakes(mode, *examples()))
        assert Samples(mode).result(func, args, kwargs) is None


@pytest.mark.canary(
    "torch.Tensor._has_symbolic_sizes_strides",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.fx.experimental.proxy_tensor.snapshot_fake",
)
def test_sizes_that_are_one_number_by_chance() -> None:
    """`n + 2` and another symbol may have the same number in their place: they are compared as they are."""
    mode = mode_for_sizes(vary=True)
    environment = environment_of(mode)
    assert environment is not None
    sizes = [environment.base(f"n{i}", 5, 1, None) for i in range(22)]
    with undecided_bookkeeping(wanted=True), mode:
        rows = [torch.empty(size, 4) for size in sizes]
        longer = torch.empty(sizes[0] + 2, 4)
        samples = Samples(mode)
        assert samples.result(aten.neg.default, (rows[0],), {}) is not None
        assert samples.result(aten.neg.default, (rows[1],), {}) is not None
        assert samples.result(aten.add.Tensor, (longer, rows[1]), {}) is None
        known = [samples.result(aten.neg.default, (row,), {}) is not None for row in rows]
    assert known == [True] * 20 + [False] * 2  # there is no number for more symbols
