"""Canaries: errors of fake tensors, to be told from errors of a model."""

import copy
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

import whence
from whence._torch.record.fake_failures import is_of_fake_tensors

REAL = torch.ones(3, 4)


class _Marked(Tensor):
    pass


def _sparse(values: Tensor) -> Tensor:
    wanted = values.sum(1).requires_grad_()
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 2], [1, 0, 2]]), wanted, (3, 3), check_invariants=False
    )


def failing(work: Callable[[Tensor], object]) -> Exception:
    mode = FakeTensorMode()
    fake = mode.from_tensor(REAL)
    with mode, pytest.raises(Exception) as caught:
        work(fake)
    return caught.value


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning", "ignore:.*quant.*:UserWarning"
)
@pytest.mark.parametrize(
    "work",
    [
        lambda fake: torch.nested.as_nested_tensor([fake, fake]),
        lambda fake: torch.tensor_split(fake, torch.tensor([1, 2])),
        lambda fake: fake + REAL,
        lambda fake: fake.as_subclass(_Marked),
        lambda fake: _sparse(fake).to_dense().sum().backward(),
        lambda fake: torch.quantize_per_tensor(fake, 0.1, 0, torch.quint8).int_repr(),
        lambda fake: torch.quantize_per_channel(fake, fake[:, 0], fake[:, 0], 0, torch.qint8),
    ],
    ids=[
        *("no_kernel", "reads_data", "real_beside_fake", "another_class", "derivative"),
        *("quantised", "quantised_by_rows"),
    ],
)
def test_failure_of_fake_tensors(work: Callable[[Tensor], object]) -> None:
    """What eager runs, and fake tensors cannot, is told from an error of the model."""
    work(REAL)
    assert is_of_fake_tensors(failing(work))


@pytest.mark.parametrize(
    "work",
    [
        lambda fake: fake @ fake,
        lambda fake: torch.nn.functional.linear(fake, torch.ones(5, 5)),
        lambda fake: fake[7],
        lambda fake: fake.nothing,
        lambda fake: {"other": fake}["key"],
    ],
    ids=["sizes", "weight", "index", "attribute", "own"],
)
def test_failure_of_the_model(work: Callable[[Tensor], object]) -> None:
    """What eager refuses, too, is the model's error."""
    assert not is_of_fake_tensors(failing(work))


@pytest.mark.filterwarnings("ignore:Sparse .*:UserWarning")
def test_a_compressed_tensor_is_refused() -> None:
    """What PyTorch says of it on fakes differs between releases; the error is ours in all of them."""

    def compressed(x: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(torch.arange(4), torch.arange(3), x[:, 0], (3, 3)) @ x

    compressed(REAL)
    with pytest.raises(whence.CaptureError):
        whence.capture(compressed, (REAL,))


def test_a_storage_is_no_argument_of_an_operator() -> None:
    """A graph has no place for one; the error says where."""

    storage = torch.ones(5).untyped_storage()

    def over_another(x: Tensor) -> Tensor:
        return torch.empty(0).set_(storage).sum() + x

    over_another(REAL)
    with pytest.raises(whence.UnsupportedOperator, match="cannot run this on fake tensors"):
        whence.capture(over_another, (REAL,))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_failure_leaves_no_guard_behind() -> None:
    """Autograd works after a capture that failed while PyTorch spelled out a tensor, once it is forgotten."""
    linear = torch.nn.Linear(4, 4)

    def linearized(x: Tensor) -> Any:
        return torch.func.linearize(lambda v: linear(v).sin(), x)[1](x)

    before = str(torch._C._dispatch_tls_local_exclude_set())
    with suppress(whence.UnsupportedOperator):
        whence.capture(linearized, (torch.randn(3, 4),))
    gc.collect()
    assert (linear.weight * 2).requires_grad
    assert str(torch._C._dispatch_tls_local_exclude_set()) == before


@torch.library.custom_op("whence_tests::without_fake", mutates_args=())
def _without_fake(x: Tensor) -> Tensor:
    return x * 2


_LAYER = torch.nn.Linear(4, 4)
EXPLAINED: dict[str, Callable[[Tensor], Any]] = {
    "a size for NumPy": lambda x: x * float(np.sqrt(x.shape[0])),
    "an operator without a fake": lambda x: _without_fake(x) + 1,
    "a module on another device": lambda x: functional_call(
        copy.deepcopy(_LAYER).to("meta"), dict(_LAYER.named_parameters()), (x,)
    ),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_capturing_cannot_do_is_explained(name: str) -> None:
    """PyTorch's own error is the reason, and the line is named."""
    EXPLAINED[name](REAL)
    shapes = ({0: torch.export.Dim("rows", min=2)},) if "size" in name else None
    with pytest.raises(whence.UnsupportedOperator, match="cannot run this on fake tensors") as caught:
        whence.capture(EXPLAINED[name], (REAL,), dynamic_shapes=shapes)
    assert "test_fake_failures.py" in str(caught.value)
