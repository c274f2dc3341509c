"""Canaries: every attribute of a module is set through `nn.Module`, and every hook registered there."""

import threading
from typing import Any

import torch
from torch import nn

from whence._torch.observe.module_calls import observed_writes


class Observer:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def attribute_set(self, module: nn.Module, name: str) -> None:
        self.told.append(name)

    def module_hook_registered(self) -> None:
        self.told.append("hook")


def test_attributes_and_hooks_are_seen() -> None:
    """Attributes of each kind and hooks of each kind are reported."""
    module: Any = nn.Linear(2, 2)
    observer = Observer()
    with observed_writes(observer):
        module.last = torch.ones(2)
        module.count = 1
        module.inner = nn.Identity()
        module.register_forward_hook(lambda *_: None)
        module.register_forward_pre_hook(lambda *_: None)
        module.register_full_backward_hook(lambda *_: None)
        module.register_full_backward_pre_hook(lambda *_: None)
    names = [name for name in observer.told if name in ("last", "count", "inner", "hook")]
    assert names == ["last", "count", "inner", *["hook"] * 4]
    assert module.count == 1
    assert len(module._forward_hooks) == 1


def test_other_threads_and_later_are_not_seen() -> None:
    """Another thread is not reported, and after the block nobody is; `nn.Module` is as before."""
    before = dict(vars(nn.Module))
    module: Any = nn.Linear(2, 2)
    observer = Observer()
    with observed_writes(observer):
        thread = threading.Thread(target=setattr, args=(module, "last", 1))
        thread.start()
        thread.join()
    module.last = 2
    assert observer.told == []
    assert dict(vars(nn.Module)) == before
