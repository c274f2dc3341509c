"""Recognise code that runs inside a hook.

Modules call their hooks in `Module._call_impl` and `BackwardHook`, from lines that say so; autograd's engine
calls hooks on tensors and on its own nodes, and besides them little else.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
import torch._compile
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.modules import module as torch_module
from torch.utils.hooks import BackwardHook

from whence._torch.files import DOOR, hook_in_words

_LOCALS = {"hook", "user_hook", "user_pre_hook"}
"""The variables of torch's functions that hold a hook when it is called."""
_ENGINE = graph._engine_run_backward.__code__
CALL_OF_MODULE = nn.Module._call_impl.__code__
"""What runs in every call of a module."""
_NO_HOOKS = (
    *(torch.autograd.function.__file__, torch.utils.checkpoint.__file__),
    *(torch._compile.__file__, DOOR),
)
"""Where else the engine calls Python: custom functions, checkpoints, and every operation that is recorded."""
HOOK_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
"""Where a module keeps its hooks, each with what it keeps there in words; those of all modules are alike."""
HOOK_FLAGS = {
    "_forward_pre_hooks": {"_forward_pre_hooks_with_kwargs": "with kwargs"},
    "_forward_hooks": {"_forward_hooks_with_kwargs": "with kwargs", "_forward_hooks_always_called": "always"},
}
"""Where it keeps what it knows of them."""
_GLOBAL = {
    "_global_forward_pre_hooks": "forward pre-hooks",
    "_global_forward_hooks": "forward hooks",
    "_global_backward_pre_hooks": "backward pre-hooks",
    "_global_backward_hooks": "backward hooks",
}


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks, its own or those for all modules."""
    return has_own_hooks(module) or any(getattr(torch_module, table) for table in _GLOBAL)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether anybody put forward or backward hooks on the module."""
    attributes = object.__getattribute__(module, "__dict__")  # asked of every module in every replayed call
    return any(map(attributes.__getitem__, HOOK_KINDS))


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether autograd is to call something for a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def global_hooks() -> dict[str, tuple[Any, ...]]:
    """The hooks that fire for every module of the process, by kind."""
    return {kinds: tuple(getattr(torch_module, table).values()) for table, kinds in _GLOBAL.items()}


def calls_a_hook(caller: FrameType, called: FrameType) -> bool:
    """Whether `caller` called the hook that `called` runs."""
    code = caller.f_code
    if code is _ENGINE:
        return not called.f_code.co_filename.startswith(_NO_HOOKS)
    return caller.f_lineno in _hook_lines().get(code, ())


@cache
def _hook_lines() -> dict[CodeType, frozenset[int]]:
    """The lines of torch's own code where hooks of modules are called, by the function they are in."""
    lines: dict[CodeType, frozenset[int]] = {}
    for function in (nn.Module._call_impl, BackwardHook._set_user_hook, BackwardHook.setup_output_hook):
        found = frozenset(_lines_in(function))
        lines |= dict.fromkeys(_codes_in(function.__code__), found)
    return lines


def _lines_in(function: Callable[..., Any]) -> Iterator[int]:
    text, start = inspect.getsourcelines(function)
    for node in ast.walk(ast.parse(textwrap.dedent("".join(text)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LOCALS:
            yield from range(start + node.lineno - 1, start + (node.end_lineno or node.lineno))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether anything is told of the gradient of `tensor` when it arrives."""
    return any(hooks_of_leaf(tensor))


def gradient_hooks(tensor: Tensor) -> list[str]:
    """The hooks that see or change the gradient of `tensor`, each with the line where it is defined."""
    return list(map(hook_in_words, hooks_on_gradient(tensor)))


def hooks_on_gradient(tensor: Tensor) -> tuple[Any, ...]:
    """The same hooks themselves, in the order in which they run."""
    return tuple(hook for hooks in hooks_of_leaf(tensor) for hook in hooks.values())


def gradient_hooks_before(tensor: Tensor) -> tuple[Any, ...]:
    """Those that run before a gradient is given to whoever asked for it."""
    return tuple(hooks_of_leaf(tensor)[0].values())


def hooks_of_leaf(leaf: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Where `leaf` keeps the hooks that run before its gradient is added to `.grad`, and those after it."""
    return leaf._backward_hooks or {}, getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
