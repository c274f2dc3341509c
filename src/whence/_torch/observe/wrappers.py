"""See through modules that only wrap another one: `torch.compile`, data parallelism.

A compiled module runs generated code and a data-parallel one talks to other processes around the call; what
is computed is what the module inside computes, under the names that the user gave it.
"""

import sys
import threading
from typing import Any

import torch
from torch import nn

_MISSING = object()
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def inner_module(module: nn.Module) -> nn.Module | None:
    """The module that `module` wraps, if it is a wrapper."""
    if _is_compiled(module):
        found: nn.Module = vars(module)["_modules"]["_orig_mod"]
        return found
    if issubclass(type(module), _PARALLEL):
        parallel: Any = module
        wrapped: nn.Module = parallel.module
        return wrapped
    return None


def seen_through(module: nn.Module) -> nn.Module:
    """The module behind any number of wrappers, or `module` itself."""
    inner = inner_module(module)
    return module if inner is None else seen_through(inner)


def wrapper_chain(module: nn.Module) -> tuple[nn.Module, ...]:
    """The wrappers that `seen_through` sees through, outermost first."""
    inner = inner_module(module)
    return () if inner is None else (module, *wrapper_chain(inner))


def _is_compiled(module: nn.Module) -> bool:
    """Asked by the class that is loaded: importing the compiler to ask would take a second.

    `isinstance` would ask a metaclass written in Python, for every module of a model.
    """
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    return loaded is not None and loaded.OptimizedModule in type(module).__mro__


def call_through(call: Any, wrapper: nn.Module, inner: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a wrapper so that its hooks run, and instead of its own work only the module inside.

    Another thread that calls the same wrapper meanwhile gets the wrapper's own work.
    """

    here, elsewhere = threading.get_ident(), wrapper.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        chosen = inner if threading.get_ident() == here else elsewhere
        return chosen(*inputs, **options)

    attributes = vars(wrapper)
    before = attributes.get("forward", _MISSING)
    attributes["forward"] = forward
    try:
        return call(wrapper, *args, **kwargs)
    finally:
        if before is not _MISSING:
            attributes["forward"] = before
        elif attributes.get("forward") is forward:
            del attributes["forward"]


def processes_averaged(module: nn.Module) -> int:
    """How many processes average their gradients through this module; 1 where none do."""
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return 1
    return int(torch.distributed.get_world_size(module.process_group))
