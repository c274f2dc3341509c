"""What a module of a tree runs: captured calls, held by a `Tree` or by an instance of the user's class."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from whence.hierarchy.plan.plan import Plan
from whence.hierarchy.tree import (
    CapturedCall,
    FlatCall,
    Readables,
    Tree,
    fitting,
    is_read,
    read,
    tell_of_mode,
)

KEY = "_whence_captured"
"""The attribute under which an instance of the user's class holds its captured calls."""


@dataclass(eq=False)
class Captured:
    """The captured calls of one module: those a person makes, and all by number; and the whole tree."""

    calls: tuple[CapturedCall, ...] = ()
    bodies: dict[int, CapturedCall] = field(default_factory=dict)
    whence_root: nn.Module | None = None
    readable: Readables = field(default_factory=Readables)
    inlined: str = ""


def captured_of(module: nn.Module) -> Any:
    """What holds the `calls` and `bodies` of a module; None for a module that was not captured."""
    return module if isinstance(module, Tree) else module.__dict__.get(KEY)


def body_of(module: nn.Module, plan: Plan, number: int) -> CapturedCall | None:
    """The call with this number of this plan that a module holds; None for one that took another's place."""
    holder = captured_of(module)
    call: CapturedCall | None = None if holder is None else holder.bodies.get(number)
    return None if call is None or call.plan is not plan else call


def train(module: nn.Module, mode: bool = True) -> nn.Module:
    """The `train` of an instance of the user's class: its own, and a warning that graphs stay as they are."""
    tell_of_mode(module, mode)
    return type(module).train(module, mode)


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of an instance of the user's class: run what was captured, called as the original is.

    Raises `CallError` when the arguments are not those of a captured call.
    """
    if torch.compiler.is_dynamo_compiling() or is_read(args, kwargs):
        return read(module, module.__dict__[KEY], args, kwargs)
    if len(args) == 1 and isinstance(args[0], FlatCall):
        return args[0].call.run_forward(module, *args[0].values)
    return fitting(module.__dict__[KEY], type(module).__name__, args, kwargs).run(module, args, kwargs)
