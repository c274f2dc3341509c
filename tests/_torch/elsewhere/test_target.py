"""The names of devices, and fake tensors that say they are there."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from whence._torch.elsewhere.target import Twins, class_meant, is_movable, spelled


@pytest.mark.parametrize(
    ("text", "device", "capability"),
    [
        ("cuda", "cuda:0", None),
        ("cuda:1", "cuda:1", None),
        ("cuda:sm80", "cuda:0", (8, 0)),
        ("cuda:1:sm90", "cuda:1", (9, 0)),
    ],
)
def test_a_device_is_named_with_what_it_is_capable_of(
    text: str, device: str, capability: tuple[int, int] | None
) -> None:
    """The number is that of the first device, and no capability is made up."""
    found = spelled(text)
    assert found is not None
    assert (found.device, found.capability) == (torch.device(device), capability)


@pytest.mark.parametrize("text", ["cpu", "gpu", "cuda:sm70", "cuda:", "", 3, None, torch.device("cuda")])
def test_other_names_mean_nothing(text: object) -> None:
    """A capability whose rules nobody has written down is none."""
    assert spelled(text) is None


def test_a_twin_is_as_the_tensor_would_be_there() -> None:
    """Device, dtype, strides and class; one twin for one tensor, also where it is held twice."""
    elsewhere = spelled("cuda")
    assert elsewhere is not None
    twins = Twins(elsewhere)
    weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float16))
    twin = twins.of(weight)
    assert isinstance(twin, FakeTensor)
    assert (twin.device.type, twin.dtype, twin.stride()) == ("cuda", torch.float16, (4, 1))
    assert twin.requires_grad
    assert isinstance(twin, nn.Parameter)
    assert twins.of(weight) is twin
    assert twins.of(torch.randn(4, 3).t()).stride() == (1, 3)
    assert class_meant(twin) is nn.Parameter
    assert class_meant(twins.of(torch.ones(2))) is torch.Tensor


def test_what_is_sparse_has_no_twin() -> None:
    """A twin says nothing of where the numbers of a sparse tensor are."""
    assert is_movable(torch.ones(2))
    assert not is_movable(torch.eye(2).to_sparse())
