"""Modules that make their parameters when they first run: `torch.nn.modules.lazy`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from whence._torch.fakes import FakeTensor
from whence._torch.pytrees import tree_flatten, tree_unflatten

Initialised = Callable[[nn.Module], None]


def uninitialised(module: nn.Module) -> list[str]:
    """The names of a module's own parameters and buffers that have no shape yet."""
    held = chain(module._parameters.items(), module._buffers.items())
    return [name for name, tensor in held if tensor is not None and is_lazy(tensor)]


def is_waiting(module: nn.Module) -> bool:
    """Whether the next call of `module` will initialise it."""
    return isinstance(module, LazyModuleMixin) and "_initialize_hook" in vars(module)


@contextmanager
def initialised_for_real(module: nn.Module, done: Initialised) -> Iterator[None]:
    """Let a call of a lazy module on fake tensors, inside the block, initialise it with real parameters.

    The module's own hook does it, when its turn comes. It sees real tensors with the shapes of its inputs and
    values that are not numbers.
    """
    handle: Any = module._initialize_hook
    hooks, number = module._forward_pre_hooks, handle.id
    infer: Any = hooks[number]

    def infer_for_real(called: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, spec = tree_flatten((args, kwargs))
        with _disable_current_modes(), _undone_on_failure(called):
            inputs, options = tree_unflatten([_real(leaf) for leaf in leaves], spec)
            infer(called, inputs, options)
            done(called)

    hooks[number] = infer_for_real
    try:
        yield
    finally:
        if number in hooks:
            hooks[number] = infer


@contextmanager
def _undone_on_failure(module: nn.Module) -> Iterator[None]:
    """Make a module lazy again when its initialisation fails or is refused."""
    restore, finished = lazy_again(module), False
    try:
        yield
        finished = True
    finally:
        if not finished:
            restore()


def lazy_again(module: nn.Module) -> Callable[[], None]:
    """A way back to a lazy module as it is now: its class, tensors, hooks and attributes."""
    kind, attributes = type(module), dict(vars(module))
    registers = [(held, held.copy()) for held in attributes.values() if isinstance(held, dict)]
    tensors: list[Any] = [getattr(module, name) for name in uninitialised(module)]
    waiting = [(tensor, type(tensor), tensor.data) for tensor in tensors]

    def restore() -> None:
        for tensor, lazy, nothing in waiting:
            tensor.__class__ = lazy
            tensor.data = nothing
        for held, before in registers:
            held.clear()
            held.update(before)
        vars(module).clear()
        vars(module).update(attributes)
        module.__class__ = kind

    return restore


def _real(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    real = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return real.fill_(math.nan if real.is_floating_point() or real.is_complex() else 0)


def without_numbers(module: nn.Module, known: set[int]) -> list[str]:
    """The names of parameters and buffers, but for `known` ones, in which something is not a number."""
    held = chain(module.named_parameters(), module.named_buffers())
    ours = ((n, tensor) for n, tensor in held if id(tensor) not in known and not is_lazy(tensor))
    return [name for name, tensor in ours if not tensor.is_meta and bool(tensor.isnan().any())]
