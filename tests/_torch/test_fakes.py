"""Fake tensors that are made directly are those that PyTorch's constructor makes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from whence._torch.fakes import FakeMaker
from whence._torch.tensors import share_memory

LIKE = torch.empty_strided((2, 3), (1, 2), dtype=torch.bfloat16)


def _mode(*, allows: bool) -> FakeTensorMode:
    mode = FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = allows
    return mode


@pytest.mark.canary(
    "torch.Tensor._make_subclass",
    "torch._C._set_throw_on_mutable_data_ptr",
    "torch._C._set_warn_deprecated_on_mutable_data_ptr",
    "torch._subclasses.fake_tensor.FakeTensorMode._allow_unsafe_data_ptr_access",
)
def test_fake_tensors_are_as_the_constructor_makes_them() -> None:
    """The first of a device is made by it, and others are like that: everything that a fake tensor knows."""
    for mode in (_mode(allows=True), _mode(allows=False)):
        memory = torch.empty_strided((2, 3), (1, 2), dtype=torch.bfloat16, device="meta")
        expected = FakeTensor(mode, memory, "cpu")
        maker = FakeMaker(mode)
        for made in (maker.like(LIKE), maker.like(LIKE), *maker.pair_like(LIKE)):
            assert type(made) is FakeTensor
            assert vars(made) == vars(expected)
            assert (made.shape, made.stride(), made.dtype) == (LIKE.shape, LIKE.stride(), LIKE.dtype)
            assert (made.device, made.fake_mode) == (LIKE.device, mode)
            assert not made.requires_grad
            with mode:
                twice = made + made
            assert twice.stride() == (LIKE + LIKE).stride()


def test_nobody_gets_the_address_of_a_fake_tensor_whose_mode_forbids_it() -> None:
    """As the constructor has it."""
    maker = FakeMaker(_mode(allows=False))
    for made in (maker.like(LIKE), maker.like(LIKE)):
        with pytest.raises(RuntimeError, match="data pointer"):
            made.data_ptr()


def test_fake_tensors_remember_nothing_of_each_other() -> None:
    """What one has found out about itself is not there on the next."""
    maker = FakeMaker(FakeTensorMode())
    first = maker.like(LIKE)
    first.item_memo = 3
    assert maker.like(LIKE).item_memo is None


def test_only_pairs_look_into_one_memory() -> None:
    """A value and what shows it."""
    maker = FakeMaker(FakeTensorMode())
    assert share_memory(*maker.pair_like(LIKE))
    assert not share_memory(maker.like(LIKE), maker.like(LIKE))
