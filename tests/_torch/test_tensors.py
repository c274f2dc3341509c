"""Canaries: versions, histories and storages of tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from whence._torch.tensors import (
    active_modes,
    addresses,
    autocast_state,
    clear_autocast_cache,
    count_writes,
    default_device,
    generator_state,
    is_on,
    is_tracked_view,
    lie_apart,
    same_bits,
    share_memory,
    untouched,
    write_all,
)

NAN = float("nan")


def test_version_counts_writes() -> None:
    """`Tensor._version` grows with every in-place operation."""
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1


def test_version_can_be_set() -> None:
    """`torch._C._autograd._unsafe_set_version_counter` takes tuples of tensors and versions."""
    tensor = torch.zeros(2).add_(1)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (7,))
    assert tensor._version == 7


def test_version_comes_back() -> None:
    """What is written in the block is not counted after it."""
    tensor = torch.zeros(2)
    with untouched([tensor]):
        tensor.add_(1)
    assert tensor._version == 0


def test_history_comes_back() -> None:
    """A buffer that got a history in the block has none after it."""
    buffer, weight = torch.zeros(2), nn.Parameter(torch.ones(2))
    with untouched([buffer]):
        buffer.add_(weight)
        assert buffer.grad_fn is not None
    assert buffer.grad_fn is None
    assert not buffer.requires_grad


def test_requirement_comes_back() -> None:
    """A parameter that was frozen in the block takes gradients after it."""
    weight = nn.Parameter(torch.ones(2))
    with untouched([weight]):
        weight.requires_grad_(False)
    assert weight.requires_grad


@pytest.mark.canary("torch.Tensor._version", "torch._C._autograd._unsafe_set_version_counter")
def test_everything_comes_back_after_an_error() -> None:
    """The same when the block raises."""
    tensor = torch.zeros(2)
    with pytest.raises(KeyError), untouched([tensor]):
        tensor.add_(1)
        raise KeyError
    assert tensor._version == 0


def test_inference_tensor_is_left_out() -> None:
    """A tensor made in inference mode has no version, and is no obstacle."""
    with torch.inference_mode():
        tensor = torch.zeros(2)
    with untouched([tensor]):
        pass
    assert tensor.is_inference()


def test_views_share_memory() -> None:
    """A view has its base's storage, a clone its own; views of different parts of one share nothing."""
    base = torch.zeros(4)
    assert share_memory(base[1:], base.view(2, 2))
    assert share_memory(base[::2], base[1::2])  # what lies between counts as well
    assert not share_memory(base, base.clone())
    assert not share_memory(base[:2], base[2:])
    assert not share_memory(base[:2], base.view(torch.uint8)[8:])
    assert not share_memory(base, base[4:])
    assert not share_memory(base, base.to_sparse())


@pytest.mark.canary("torch.UntypedStorage._cdata")
def test_empty_and_meta_tensors_share_no_memory() -> None:
    """Storages without data are told apart by identity."""
    assert not share_memory(torch.empty(0), torch.empty(0))
    assert not share_memory(torch.empty(2, device="meta"), torch.empty(2, device="meta"))


def test_modes_are_passed_by() -> None:
    """Inside `_disable_current_modes` tensors are real, whatever mode is on."""
    with FakeTensorMode(), _disable_current_modes():
        assert torch.ones(2).sum().item() == 2


@pytest.mark.canary("torch.utils._python_dispatch._disable_current_modes")
def test_generator_is_read_past_modes() -> None:
    """The state of the generator is its bytes, under a mode too, and changes with every draw."""
    before = generator_state()
    with FakeTensorMode():
        assert generator_state() == before
    torch.rand(1)
    assert generator_state() != before


def test_autocast_forgets() -> None:
    """After clearing, autocast casts a weight again."""
    weight = nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = torch.mm(weight, weight)
        clear_autocast_cache()
        assert torch.equal(torch.mm(weight, weight), first)


class Seeing(TorchFunctionMode):
    """Sees every torch function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.canary(
    "torch._C._len_torch_dispatch_stack",
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
)
def test_modes_are_named() -> None:
    """`_get_current_function_mode_stack` and `_get_current_dispatch_mode_stack` list modes, outermost first;
    `torch._C._len_torch_function_stack` and `torch._C._len_torch_dispatch_stack` count them."""
    assert active_modes() == ()
    with Seeing(), FakeTensorMode():
        assert torch._C._len_torch_function_stack() == len(_get_current_function_mode_stack()) == 1
        assert torch._C._len_torch_dispatch_stack() == len(_get_current_dispatch_mode_stack()) == 1
        assert active_modes() == ("Seeing", "FakeTensorMode")


@pytest.mark.canary("torch._C._is_any_autocast_enabled")
def test_autocast_is_seen() -> None:
    """`torch._C._is_any_autocast_enabled` knows of every device type."""
    assert not torch._C._is_any_autocast_enabled()
    assert autocast_state() == ()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch._C._is_any_autocast_enabled()
        assert autocast_state() == (("cpu", "torch.bfloat16"),)


@pytest.mark.canary("torch._C._len_torch_function_stack")
def test_default_device_is_a_function_mode() -> None:
    """With an empty `torch._C._len_torch_function_stack` tensors are made on the CPU."""
    assert default_device() == torch.get_default_device() == torch.device("cpu")
    with torch.device("meta"):
        assert default_device() == torch.device("meta")
    torch.set_default_device("meta")
    try:
        assert default_device() == torch.get_default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        pytest.param(torch.tensor([1.0]), torch.tensor([1.0]), True, id="equal"),
        pytest.param(torch.tensor([1.0]), torch.tensor([1.0 + 1e-7]), False, id="last bit"),
        pytest.param(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True, id="nan"),
        pytest.param(torch.tensor([NAN]), torch.tensor([1.0]), False, id="nan and number"),
        pytest.param(torch.tensor([NAN]), torch.tensor([-NAN]), True, id="nan and another"),
        pytest.param(torch.tensor([0.0]), torch.tensor([-0.0]), False, id="zeros of two signs"),
        pytest.param(torch.tensor(complex(0, -0.0)), torch.tensor(0j), False, id="complex zeros"),
        pytest.param(torch.ones(2, 3).t(), torch.ones(3, 2), True, id="two layouts"),
        pytest.param(torch.tensor([1]), torch.tensor([2]), False, id="integers"),
        pytest.param(torch.tensor([True]), torch.tensor([True]), True, id="booleans"),
        pytest.param(
            torch.tensor([complex(NAN, 1)]), torch.tensor([complex(NAN, 1)]), True, id="complex nan"
        ),
        pytest.param(torch.empty(0), torch.empty(0), True, id="nothing"),
        pytest.param(torch.tensor([float("inf")]), torch.tensor([float("inf")]), True, id="infinity"),
    ],
)
def test_same_bits(left: Tensor, right: Tensor, expected: bool) -> None:
    """Tensors are the same when every number is, NaN being the same as NaN."""
    assert same_bits(left, right) is expected


@pytest.mark.canary("torch._foreach_copy_")
def test_many_are_written_at_once() -> None:
    """Also of another dtype, and sparse ones."""
    targets = [torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(2).to_sparse()]
    write_all(targets, [torch.ones(2), torch.ones(2), torch.ones(2).to_sparse()])
    assert [target.to_dense().tolist() for target in targets] == [[1.0, 1.0]] * 3
    write_all([], [])


def test_writes_past_autograd_are_counted() -> None:
    """Not of tensors that torch counts nothing of."""
    with torch.inference_mode():
        uncounted = torch.ones(2)
    counted = torch.ones(2)
    count_writes([counted, uncounted])
    assert counted._version == 1


@pytest.mark.canary("torch.Tensor._is_view")
def test_views_are_what_autograd_tracks_as_such() -> None:
    """A part of a tensor is one, and what is computed from it is none."""
    base = torch.ones(2)
    assert is_tracked_view(base[:1])
    assert not is_tracked_view(base) and not is_tracked_view(base[:1] * 2)


def test_what_is_written_lies_apart() -> None:
    """Overlapping bytes count where one of both is written."""
    flat = torch.zeros(8)
    left, middle, right = flat[:4], flat[2:6], flat[4:]
    assert lie_apart([left], [right])
    assert lie_apart([], [left, middle])
    assert not lie_apart([left], [middle])
    assert not lie_apart([left, middle], [])
    assert not lie_apart([middle], [left, right])
    assert not lie_apart([flat], [torch.zeros(1), right[2:]])


def test_addresses_are_those_of_plain_dense_tensors() -> None:
    """A sparse tensor has none."""
    tensor = torch.zeros(2)
    assert addresses([tensor, nn.Parameter(tensor)]) == (tensor.data_ptr(), tensor.data_ptr())
    assert addresses([tensor, tensor.to_sparse()]) is None


@pytest.mark.canary("torch._subclasses.fake_tensor.FakeTensor._fake_device")
def test_kinds_of_devices() -> None:
    """Fakes are on the device that they say; what is no tensor is on none."""
    with FakeTensorMode():
        fake = torch.empty(2, device="cuda")
    assert [is_on("cuda", each) for each in (fake, torch.ones(2), 3)] == [True, False, False]
    assert is_on("cpu", torch.ones(2))
