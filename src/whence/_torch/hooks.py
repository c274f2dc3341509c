"""Recognise code that runs inside a hook.

Modules call their hooks in `Module._call_impl` and `BackwardHook`, from lines that say so; autograd's engine
calls hooks on tensors and on its own nodes, and besides them little else.
"""

import ast
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch._compile
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import BackwardHook

_NAMES_OF_HOOKS = {"hook", "user_hook", "user_pre_hook"}
_ENGINE = graph._engine_run_backward.__code__
_NO_HOOKS = (
    *(torch.autograd.function.__file__, torch.utils.checkpoint.__file__),
    *(torch._compile.__file__, f"{Path(__file__).parent}{os.sep}"),
)
"""Where else the engine calls Python: custom functions, checkpoints, and every operation that is recorded."""
_GLOBAL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
HOOK_TABLES = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
"""Where a module keeps its hooks, and what it knows of them."""
_OWN = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks, its own or those for all modules."""
    attributes = vars(module)
    return any(attributes[name] for name in _OWN) or any(getattr(global_hooks, name) for name in _GLOBAL)


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
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMES_OF_HOOKS:
            yield from range(start + node.lineno - 1, start + (node.end_lineno or node.lineno))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def gradient_hooks(tensor: Tensor) -> list[str]:
    """The hooks that see or change the gradient of `tensor`, each with the line where it is defined."""
    registered = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [described(hook) for hooks in registered for hook in (hooks or {}).values()]


def described(hook: Any) -> str:
    """The name of a hook and the line where it is defined: `clip at model.py:12`."""
    while hasattr(hook, "func"):  # a partial
        hook = hook.func
    function = inspect.unwrap(hook) if callable(hook) else hook
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"
