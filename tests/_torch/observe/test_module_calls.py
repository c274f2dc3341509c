"""Canaries: how modules are called and reached."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from whence._torch.observe.module_calls import ObservedCall, observed_modules

X = torch.ones(2, 4)


class Observer:
    """Notes calls and accesses."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.accesses: list[str] = []

    @contextmanager
    def called(self, module: nn.Module, args: Any, kwargs: Any) -> Iterator[ObservedCall]:
        name = type(module).__name__
        self.calls.append(f"{name} begins")
        try:
            yield ObservedCall(lambda result: self.calls.append(f"{name} returns"))
        finally:
            self.calls.append(f"{name} ends")

    def accessed(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        self.accesses.append(f"{type(parent).__name__}.{name}")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.Module, "__call__"),
        (nn.Module, "__getattr__"),
        (nn.Sequential, "__iter__"),
        (nn.Sequential, "__getitem__"),
        (nn.ModuleList, "__iter__"),
        (nn.ModuleList, "__getitem__"),
        (nn.ModuleDict, "__getitem__"),
        (nn.ModuleDict, "values"),
        (nn.ModuleDict, "items"),
    ],
)
def test_accessor_is_the_class_s_own(owner: type, name: str) -> None:
    """Each accessor is defined on the class where we put the patch, is patched, and comes back."""
    before = owner.__dict__[name]
    with observed_modules(Observer()):
        assert owner.__dict__[name] is not before
    assert owner.__dict__[name] is before


def test_submodules_are_reached_through_getattr() -> None:
    """A submodule is not among the instance's own attributes, so `__getattr__` is asked."""
    module = nn.Sequential(nn.ReLU())
    assert "0" not in vars(module)
    assert "0" in vars(module)["_modules"]


def test_calls_are_seen_inside_each_other() -> None:
    """A call lasts from before the forward to after it, and its result is reported."""
    observer = Observer()
    with observed_modules(observer):
        nn.Sequential(nn.ReLU())(X)
    inner = ["ReLU begins", "ReLU returns", "ReLU ends"]
    assert observer.calls == ["Sequential begins", *inner, "Sequential returns", "Sequential ends"]


def test_call_that_raises_ends_without_a_result() -> None:
    """A call that raises is seen to end."""
    observer = Observer()
    with observed_modules(observer), pytest.raises(RuntimeError):
        nn.Linear(3, 3)(X)
    assert observer.calls == ["Linear begins", "Linear ends"]


def test_module_s_own_call_is_seen() -> None:
    """A call of a subclass that defines `__call__` and ends in the module's is seen."""

    class Calling(nn.Linear):
        def __call__(self, x: torch.Tensor) -> Any:
            return super().__call__(x)

    observer = Observer()
    with observed_modules(observer):
        Calling(4, 4)(X)
    assert observer.calls[0] == "Calling begins"


def reach_attribute(module: Any) -> None:
    _ = module.inner


def reach_list(module: Any) -> None:
    for _ in module.items_list:
        pass


def reach_index(module: Any) -> None:
    _ = module.items_list[0]


def reach_key(module: Any) -> None:
    _ = module.items_dict["key"]


def reach_values(module: Any) -> None:
    list(module.items_dict.values())


def reach_items(module: Any) -> None:
    list(module.items_dict.items())


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ReLU()
        self.items_list = nn.ModuleList([nn.ReLU()])
        self.items_dict = nn.ModuleDict({"key": nn.ReLU()})


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        (reach_attribute, ["Holder.inner"]),
        (reach_list, ["Holder.items_list", "ModuleList.0"]),
        (reach_index, ["Holder.items_list", "ModuleList.0"]),
        (reach_key, ["Holder.items_dict", "ModuleDict.key"]),
        (reach_values, ["Holder.items_dict", "ModuleDict.key"]),
        (reach_items, ["Holder.items_dict", "ModuleDict.key"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_every_way_to_a_submodule_is_seen(reach: Callable[[Any], None], expected: list[str]) -> None:
    """A submodule is seen to be reached by attribute, index, key or iteration."""
    observer, holder = Observer(), Holder()
    with observed_modules(observer):
        reach(holder)
    assert observer.accesses == expected


def test_slice_is_no_access() -> None:
    """A slice of a list makes a new list, and reaches no submodule by a name."""
    observer, holder = Observer(), Holder()
    with observed_modules(observer):
        holder.items_list[:1]
    assert "ModuleList.0" not in observer.accesses[:1]


def test_missing_attribute_is_python_s_own_error() -> None:
    """An attribute that is not there raises what it raises without observation."""
    with (
        observed_modules(Observer()),
        pytest.raises(AttributeError, match="'ReLU' object has no attribute 'nothing'"),
    ):
        _ = nn.ReLU().nothing


def test_other_threads_are_not_seen() -> None:
    """A module that runs in another thread runs unobserved."""
    observer, module = Observer(), nn.Sequential(nn.ReLU())
    with observed_modules(observer):
        thread = threading.Thread(target=module, args=(X,))
        thread.start()
        thread.join()
    assert (observer.calls, observer.accesses) == ([], [])
