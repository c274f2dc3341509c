"""Calls that the code of a captured call makes of others: found anew each time, and quickly."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from whence.errors import CallError
from whence.hierarchy.plan.plan import Half
from whence.hierarchy.run.captured import FlatCall, Inside, body_of, captured_of
from whence.hierarchy.run.hooks import has_hooks, is_watched, run_hooked
from whence.hierarchy.swap.newcomers import SwapTrial
from whence.hierarchy.swap.preserved import CallPlace
from whence.hierarchy.swap.unpreserved import Unpreserved, in_place_of, name_of_repeated, replaced
from whence.hierarchy.tree import Tree
from whence.provenance import ModulePath

if TYPE_CHECKING:
    from whence.hierarchy.emit.calls import CallBody

ChildCall = Callable[..., tuple[Any, ...]]
"""Makes one call of a caller's code: takes the caller's module and flat values."""


def child_call(path: ModulePath, from_caller: bool, place: CallPlace, half: Half) -> ChildCall:
    """Finds the module of a call, from the caller or from the root, each time, and runs one half of the call.

    A module that took the place of a preserved one is called as the original was. This runs between any two
    modules, after operations that leave nothing of them in the processor's caches: it is one function that
    does everything itself, and has at hand what it needs of the module that it met last.
    """
    is_forward = half is Half.FORWARD
    may_be_new = not is_forward and place.number in place.plan.program.calls.preserved
    newcomer, repeated = in_place_of(place), name_of_repeated(place)
    only = Unpreserved(place, only=True)
    last: tuple[Callable[[], nn.Module | None], Any, Any, Any] = (_none, None, None, ())

    def run(caller: Tree, *values: Any) -> tuple[Any, ...]:
        nonlocal last
        if may_be_new and values and isinstance(values[0], SwapTrial):
            return place.backward(values[0], values[1:])
        module: Any = caller if from_caller else captured_of(caller).whence_root
        held = module
        for segment in path:
            held, module = module, module._modules.get(segment)
            if module is None:
                raise replaced(place, held, f"the graph around it calls {segment!r} in it")
        if repeated and repeated in held._modules:
            return only.forward(held._modules[repeated], values)
        met, call, function, calls = last
        if met() is not module:
            call = body_of(module, place.plan, place.number)
            if call is None:
                if not is_forward:
                    raise _replaced_between(path, module)
                return newcomer.forward(module, values)
            function, calls = call.function(half)
            last = ref(module), call, function, calls
        if is_forward and (is_watched(module) or torch.compiler.is_compiling()):
            return _run_watched(call, module, values)
        return function(module, calls, *values)  # type: ignore[no-any-return]

    return run


def _none() -> None:
    """What a reference to no module gives."""


def _run_watched(call: "CallBody", module: nn.Module, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A call that hooks, a compiler or a capture see."""
    if has_hooks(module):
        return run_hooked(call, module, values)
    if module._compiled_call_impl is not None:
        return module(Inside, call.number, *values)  # type: ignore[no-any-return]
    return module(FlatCall(call, values))  # type: ignore[no-any-return]


def _replaced_between(path: ModulePath, module: nn.Module) -> CallError:
    return CallError(
        f"{path} was replaced by a {type(module).__name__} between a forward and its backward",
        why="the captured backward reads the weights of the module that ran",
        remedy="replace modules between training steps",
    )
