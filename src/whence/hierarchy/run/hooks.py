"""Forward hooks on the modules of a tree: they see the arguments and the result as on the original."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from whence._torch.observe.hooks import has_backward_hooks
from whence._torch.pytrees import tree_flatten
from whence.errors import CallError
from whence.program import Absent, Named

if TYPE_CHECKING:
    from whence.hierarchy.emit.calls import CallBody

_UNREAD = Absent("the call does not read it, and is not given it; preserve_calls hands it in")


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody put a hook on the module since the tree was made."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_watched(module: nn.Module) -> bool:
    """Whether it has hooks, or a compiled form of its own.

    Read from the instance: this is asked at every call, and an attribute is looked for in the class first.
    """
    attributes = module.__dict__
    return bool(
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes.get("_compiled_call_impl") is not None
    )


def run_hooked(call: "CallBody", module: nn.Module, values: Sequence[Any]) -> tuple[Any, ...]:
    """Run a call inside the tree with its module's forward hooks around it.

    A hook may replace the result. Replacing the arguments, and backward hooks, are refused: the captured
    graph around the call would not see them.
    """
    if has_backward_hooks(module):
        raise _refusal(module, "it has a backward hook, and its backward runs inside a captured graph")
    named = dict(zip(call.call_plan.forward.inputs, values, strict=True))
    args, kwargs = _hook_arguments(call, named)
    for identifier, hook in module._forward_pre_hooks.items():
        with_kwargs = identifier in module._forward_pre_hooks_with_kwargs
        changed = hook(module, args, kwargs) if with_kwargs else hook(module, args)
        if changed is not None:
            raise _refusal(module, "a forward pre-hook returned new arguments")
    results = call.run_forward(module, *values)
    return _after_hooks(call, module, named, results, (args, kwargs))


def _hook_arguments(call: "CallBody", named: dict[str, Any]) -> tuple[Any, Any]:
    interface = call.interface
    if interface is None:
        return (), {}
    leaves = [
        leaf if name is None else named.get(name, _UNREAD)
        for name, leaf in zip(interface.leaves, interface.convention.leaves, strict=True)
    ]
    args, kwargs = interface.convention.unflatten(leaves)
    return args, kwargs


def _after_hooks(
    call: "CallBody",
    module: nn.Module,
    named: dict[str, Any],
    results: tuple[Any, ...],
    arguments: tuple[Any, Any],
) -> tuple[Any, ...]:
    interface = call.interface
    if interface is None or not module._forward_hooks:
        return results
    outputs = call.call_plan.forward.outputs
    present = {**named, **dict(zip(outputs, results, strict=False))}
    for identifier, hook in module._forward_hooks.items():
        result = interface.result.filled(present)
        with_kwargs = identifier in module._forward_hooks_with_kwargs
        changed = hook(module, *arguments, result) if with_kwargs else hook(module, arguments[0], result)
        if changed is not None:
            if interface.gradients is not None and torch.is_grad_enabled():
                raise _refusal(module, "a forward hook returned a result that the captured backward ignores")
            leaves, _ = tree_flatten(changed)
            pairs = zip(interface.result.leaves, leaves, strict=True)
            present |= {leaf.name: value for leaf, value in pairs if isinstance(leaf, Named)}
    return (*(present[name] for name in outputs), *results[len(outputs) :])


def _refusal(module: nn.Module, why: str) -> CallError:
    return CallError(
        f"a hook on {module._get_name()} cannot be honoured in a captured tree",
        why=why,
        remedy="register the hook on the original model and capture again",
    )
