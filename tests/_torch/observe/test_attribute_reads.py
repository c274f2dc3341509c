"""Canaries: how attributes of modules and objects are looked up."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whence._torch.observe.attribute_reads import ReadObserver, holds_settings, is_observable
from whence._torch.observe.hooks import global_hooks


class Listener:
    """Notes reads of the things it knows."""

    def __init__(self, *known: object) -> None:
        self.known = {id(thing) for thing in known}
        self.reads: list[str] = []

    def read(self, holder: object, name: str, value: object) -> bool:
        return self._note(holder, name)

    def missing(self, holder: object, name: str) -> bool:
        return self._note(holder, f"no {name}")

    def _note(self, holder: object, name: str) -> bool:
        if id(holder) in self.known:
            self.reads.append(f"{type(holder).__name__}.{name}")
        return id(holder) in self.known


def reads_of(work: Callable[[], Any], *modules: nn.Module) -> list[str]:
    """What `work` reads of these modules."""
    listener = Listener(*modules)
    with ReadObserver(listener).active(modules):
        work()
    return listener.reads


def test_parameters_buffers_submodules_and_attributes() -> None:
    """All four ways in which a module holds something are seen, each name once."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    norm = model[0]

    def work() -> None:
        for _ in range(2):
            assert norm.weight is not None
            assert norm.running_mean is not None
            assert norm.eps == 1e-05
            assert model[0] is norm

    assert reads_of(work, model, norm) == [
        *("BatchNorm1d.weight", "BatchNorm1d.running_mean", "BatchNorm1d.eps"),
        *("Sequential._get_item_by_idx", "Sequential._modules"),
    ]


def test_a_call_reads_forward() -> None:
    """Module's machinery looks `forward` up in every call, and nothing else that is not plumbing."""
    linear = nn.Linear(2, 2)
    reads = reads_of(lambda: linear(torch.ones(1, 2)), linear)
    assert reads == ["Linear.forward", "Linear.weight", "Linear.bias"]


def test_going_through_children_reads_the_table() -> None:
    """Iteration, length and the named_… methods depend on the table of submodules or parameters."""
    model = nn.ModuleList([nn.Linear(2, 2)])
    assert "ModuleList._modules" in reads_of(lambda: list(model), model)
    assert "ModuleList._modules" in reads_of(lambda: len(model), model)
    assert "ModuleList._modules" in reads_of(lambda: list(model.named_children()), model)
    assert "Linear._parameters" in reads_of(lambda: list(model.parameters()), model[0])


def test_a_missing_attribute() -> None:
    """`hasattr` that says no is a read too."""
    linear = nn.Linear(2, 2)
    assert reads_of(lambda: hasattr(linear, "gamma"), linear) == ["Linear.no gamma"]


def test_a_class_with_its_own_lookup() -> None:
    """A `__getattribute__` of the user that does not ask nn.Module's is seen as well."""

    class Own(nn.Module):
        scale = 2.0

        def __getattribute__(self, name: str) -> Any:
            return object.__getattribute__(self, name)

    model = Own()
    assert reads_of(lambda: model.scale, model) == ["Own.scale"]
    assert "__getattribute__" in Own.__dict__


def test_objects_of_watched_classes() -> None:
    """An object is seen from the moment its class is observed, until the end."""

    class Options:
        def __init__(self) -> None:
            self.scale = 2.0

    options = Options()
    listener = Listener(options)
    observer = ReadObserver(listener)
    with observer.active([]):
        assert options.scale == 2.0
        assert observer.observe_class_of(options)
        assert options.scale == 2.0
        assert options.scale == 2.0
    assert options.scale == 2.0
    assert listener.reads == ["Options.scale"]
    assert "__getattribute__" not in Options.__dict__


def test_other_threads_are_not_seen() -> None:
    """What another thread reads meanwhile is its own affair."""
    linear = nn.Linear(2, 2)

    def work() -> None:
        thread = threading.Thread(target=lambda: linear(torch.ones(1, 2)))
        thread.start()
        thread.join()

    assert reads_of(work, linear) == []


def test_everything_is_put_back() -> None:
    """After the block, also after an error, the classes are as before."""
    before = dict(vars(nn.Module))
    with pytest.raises(ZeroDivisionError):
        reads_of(lambda: 1 // 0)
    assert dict(vars(nn.Module)) == before
    assert "__getattribute__" not in vars(nn.Module)


@pytest.mark.parametrize("value", [1, "x", [1], torch.ones(1), torch.Generator(), threading.Lock(), len])
def test_classes_that_cannot_be_observed(value: object) -> None:
    """Built-in classes and those of torch are left alone."""
    assert not is_observable(type(value))
    assert not ReadObserver(Listener()).observe_class_of(value)


class FileOfEach:
    """Says of each object of which file it is, as Cython's functions do."""

    __module__ = property(lambda self: "elsewhere")


def test_a_class_whose_objects_say_of_which_file_they_are() -> None:
    """It is none of a user's, and nothing is asked of what stands for the name of its file."""
    assert not is_observable(FileOfEach)
    assert not holds_settings(FileOfEach)


@pytest.mark.canary("torch.nn.Module._call_impl.hook", "torch.utils.hooks.BackwardHook._set_user_hook.hook")
def test_global_hooks() -> None:
    """Hooks on all modules are found by kind."""
    assert global_hooks() == {
        "forward pre-hooks": (),
        "forward hooks": (),
        "backward pre-hooks": (),
        "backward hooks": (),
    }

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        return None

    handles = [
        nn.modules.module.register_module_forward_pre_hook(hook),
        nn.modules.module.register_module_forward_hook(hook),
        nn.modules.module.register_module_full_backward_pre_hook(hook),  # type: ignore[arg-type]
        nn.modules.module.register_module_full_backward_hook(hook),
    ]
    assert all(hooks == (hook,) for hooks in global_hooks().values())
    for handle in handles:
        handle.remove()
