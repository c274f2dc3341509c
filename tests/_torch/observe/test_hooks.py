"""Canaries: from which lines torch calls hooks, and where hooks on gradients are kept."""

import functools
import sys
from typing import Any

import pytest
import torch
import torch._compile
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.hooks import BackwardHook

from whence._torch.files import hook_in_words
from whence._torch.observe.hooks import CALL_OF_MODULE, _hook_lines, calls_a_hook, gradient_hooks, has_hooks

X = torch.ones(2, 2, requires_grad=True)


class Frames:
    """A hook that asks, frame by frame, whether it is one."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def __call__(self, *_: Any) -> None:
        frame = sys._getframe()
        assert frame.f_back is not None
        self.answers.append(calls_a_hook(frame.f_back, frame))


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_pre_hook,
        nn.Module.register_forward_hook,
        nn.Module.register_full_backward_pre_hook,
        nn.Module.register_full_backward_hook,
    ],
    ids=lambda register: register.__name__,
)
def test_hooks_of_a_module_are_recognised(register: Any) -> None:
    """`Module._call_impl` and `BackwardHook` call hooks from lines that are known."""
    module, hook = nn.Linear(2, 2), Frames()
    assert not has_hooks(module)
    register(module, hook)
    assert has_hooks(module)
    module(X).sum().backward()
    assert hook.answers == [True]


@pytest.mark.canary(
    *("torch.nn.modules.module._global_forward_hooks", "torch.nn.modules.module._global_forward_pre_hooks"),
    *("torch.nn.modules.module._global_backward_hooks", "torch.nn.modules.module._global_backward_pre_hooks"),
)
def test_hook_for_all_modules_is_recognised() -> None:
    """Hooks of all modules are in four global dictionaries."""
    hook, module = Frames(), nn.Identity()
    with nn.modules.module.register_module_forward_hook(hook):
        assert has_hooks(module)
        module(X)
    assert hook.answers == [True]
    assert not has_hooks(module)


@pytest.mark.canary("torch.autograd.graph._engine_run_backward")
def test_hooks_that_the_engine_calls_are_recognised() -> None:
    """A hook on a tensor or a node is called by `torch.autograd.graph._engine_run_backward` itself."""
    hook = Frames()
    result = X * 2
    result.register_hook(hook)
    history: Any = result.grad_fn
    history.register_prehook(hook)
    history.register_hook(hook)
    result.sum().backward()
    assert hook.answers == [True] * 3


def test_forward_is_no_hook() -> None:
    """The forward is called by the same function as hooks, from other lines."""
    hook = Frames()

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            frame = sys._getframe()
            assert frame.f_back is not None
            hook.answers.append(calls_a_hook(frame.f_back, frame))
            return x

    module = Asking()
    module(X)
    module.register_forward_hook(lambda *_: None)
    module(X)
    assert hook.answers == [False, False]


@pytest.mark.canary("torch._compile")
@pytest.mark.canary(
    *("torch.nn.Module._call_impl.hook", "torch.utils.hooks.BackwardHook._set_user_hook"),
    *("torch.utils.hooks.BackwardHook._set_user_hook.hook",),
    *("torch.utils.hooks.BackwardHook.setup_output_hook.user_hook",),
    *("torch.utils.hooks.BackwardHook.setup_output_hook.user_pre_hook",),
)
def test_every_place_has_lines() -> None:
    """Each function that calls hooks of modules was read, and says where."""
    lines = _hook_lines.__wrapped__()
    for function in (nn.Module._call_impl, BackwardHook._set_user_hook, BackwardHook.setup_output_hook):
        assert lines[function.__code__]
    assert graph._engine_run_backward.__code__ not in lines
    assert torch._compile.__file__.endswith("_compile.py")


def clip(_gradient: Tensor) -> None:
    """A hook that does nothing."""


@pytest.mark.canary(
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.nn.Module._backward_hooks",
)
def test_gradient_hooks_are_described() -> None:
    """Hooks of both kinds on a parameter, in `_backward_hooks` and `_post_accumulate_grad_hooks`."""
    parameter = nn.Parameter(torch.ones(2))
    assert gradient_hooks(parameter) == []
    parameter.register_hook(clip)
    parameter.register_post_accumulate_grad_hook(Frames())
    first, second = gradient_hooks(parameter)
    assert first == f"clip at {__file__}:{clip.__code__.co_firstlineno}"
    assert second.startswith(f"Frames at {__file__}")


def test_partial_and_builtin_hooks_are_described() -> None:
    """A partial is described by its function, and a builtin by its name."""
    assert hook_in_words(functools.partial(clip)).startswith("clip at ")
    assert hook_in_words(torch.relu).endswith("relu")


def test_every_call_of_a_module_runs_one_code() -> None:
    """`Module._call_impl` is between a forward and whoever calls the module, with hooks and without."""

    class Calling(nn.Module):
        def forward(self) -> bool:
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code is not CALL_OF_MODULE:
                frame = frame.f_back
            return frame is not None

    module = Calling()
    assert module()
    module.register_forward_pre_hook(lambda *_: None)
    assert module()
    assert not module.forward()
