"""Canaries: how pack hooks of saved tensors are made and called."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from whence._torch.autograd.saved_tensors import observed_packing, packs_what_is_saved

NAMES: list[str] = []
TORCHS: list[bool] = []


@contextmanager
def packing(name: str, is_torchs: bool) -> Iterator[None]:
    """Notes the name, and whose it is."""
    NAMES.append(name)
    TORCHS.append(is_torchs)
    yield


def double(tensor: Tensor) -> Tensor:
    """A pack hook."""
    return tensor * 2


def halve(tensor: Tensor) -> Tensor:
    """An unpack hook."""
    return tensor / 2


def test_packing_is_seen() -> None:
    """Every hook is made by `saved_tensors_hooks.__init__`, also by `save_on_cpu`, and packs as before."""
    NAMES.clear()
    x = torch.ones(2, requires_grad=True)
    with observed_packing(packing, lambda: None):
        with saved_tensors_hooks(double, halve):
            result = x.sin()
        with torch.autograd.graph.save_on_cpu():
            result = result.cos()
    assert NAMES[0] == "double"
    assert "save_on_cpu" in NAMES[1]
    assert TORCHS[-2:] == [False, True]
    [gradient] = torch.autograd.grad(result.sum(), [x])
    assert torch.equal(gradient, -torch.sin(torch.sin(x)) * torch.cos(x))


def test_other_threads_are_not_seen() -> None:
    """A hook of another thread packs unseen, and the class is as before afterwards."""
    NAMES.clear()
    before = saved_tensors_hooks.__init__

    def work() -> None:
        with saved_tensors_hooks(double, halve):
            torch.ones(2, requires_grad=True).sin()

    with observed_packing(packing, lambda: None):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert NAMES == []
    assert saved_tensors_hooks.__init__ is before


@pytest.mark.canary("torch._C._autograd._top_saved_tensors_default_hooks")
def test_hooks_that_pack_are_seen() -> None:
    """`torch._C._autograd._top_saved_tensors_default_hooks` gives the hooks that are on."""
    assert not packs_what_is_saved()
    with torch.autograd.graph.save_on_cpu():
        assert packs_what_is_saved()
    assert not packs_what_is_saved()
