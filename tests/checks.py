"""What the tests of several rooms share: comparing bits, and noting what a capture must not touch."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatch

import whence
from tests.models import ModelCase, case
from whence._torch import patching
from whence.tracing.sandbox import capture_lock as turns

Backward = bool | Callable[[Any], Tensor]
T = TypeVar("T")


def verified(
    model: Callable[..., Any], *args: Any, backward: Backward = False, **kwargs: Any
) -> whence.Program:
    """The program of a model on these inputs, compared with eager bit for bit."""
    program = whence.capture(model, args, kwargs, backward=backward)
    result = program.verify(model, args, kwargs)
    assert result.ok, str(result)
    return program


def backward_of(row: ModelCase, mode: str) -> Backward:
    """What `backward` is in a mode: `forward`, `tangents` or `loss`."""
    return row.loss if mode == "loss" else mode == "tangents"


@cache
def captured(name: str, mode: str) -> whence.Program:
    """The program of a case of the table in a mode, to be read and never to be changed."""
    row = case(name)
    model, args, kwargs = row.make()
    return whence.capture(model, args, kwargs, backward=backward_of(row, mode))


def same_bits(left: Any, right: Any) -> bool:
    """Equal bit for bit, NaN equal to NaN, a zero not to one of the other sign; anything else by `==`."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    same_sign = left.signbit() == right.signbit() if left.is_floating_point() else torch.tensor(True)
    return bool(((left == right) & same_sign | (left.isnan() & right.isnan())).all())


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The names whose values are not the same bits, or are on one side only."""
    names = dict.fromkeys([*expected, *found])
    return [
        name
        for name in names
        if name not in expected or name not in found or not same_bits(expected[name], found[name])
    ]


def taken(notes: SimpleQueue[T]) -> list[T]:
    """What a model has noted: a capture gives lists and the like back as they were, and no queue."""
    return [notes.get_nowait() for _ in range(notes.qsize())]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every gradient, by the name of the parameter or buffer."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: None if tensor.grad is None else tensor.grad.clone() for name, tensor in tensors}


def state(module: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer, by name."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors}


def surroundings() -> dict[str, Any]:
    """Everything outside a model that a capture could leave changed."""
    patched = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, torch.random, random)
    return {
        **{f"attributes of {owner.__name__}": dict(vars(owner)) for owner in patched},
        "collector": gc.isenabled(),
        "turn": turns._is_mine(),
        "patches": list(patching._on),
        "torch generator": torch.get_rng_state().tolist(),
        "python generator": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "multithreaded autograd": torch.autograd.is_multithreading_enabled(),
        "saved_tensors_hooks": torch.autograd.graph.saved_tensors_hooks.__init__,
        "compiler's stance": torch._dynamo.eval_frame._stance,
        "checkpoint frames": torch.utils.checkpoint._CheckpointFrame.__init__,
        "compiling": torch.compiler.is_compiling(),
        "exporting": torch.compiler.is_exporting(),
        "flags": (torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dispatch modes": dispatch._get_current_dispatch_mode_stack(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "dispatch keys": str(torch._C._dispatch_tls_local_include_set()),
        "dispatch keys passed over": str(torch._C._dispatch_tls_local_exclude_set()),
    }


def parts(module: nn.Module) -> dict[str, Any]:
    """What a model consists of: tensors by identity and version, hooks, submodules and attributes."""
    found: dict[str, Any] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        found[path] = {name: id(value) for name, value in vars(inner).items()}
        contents = {name: value for name, value in vars(inner).items() if isinstance(value, dict)}
        found[f"{path} contents"] = {
            name: [*map(id, value), *map(id, value.values())] for name, value in contents.items()
        }
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        described = (
            tensor._version,
            tensor.requires_grad,
            tensor.grad_fn,
            id(tensor.grad),
            tensor.data_ptr(),
        )
        found[f"tensor {name}"] = (type(tensor), tensor.device, tensor.shape, *described)
        found[f"value {name}"] = tensor.detach().clone()
    return found


@contextmanager
def leaves_no_trace(*modules: nn.Module) -> Iterator[None]:
    """The block must leave the modules and everything around them exactly as they were."""
    before, outside = [parts(module) for module in modules], surroundings()
    yield
    now = surroundings()
    changed = [name for name, value in outside.items() if value != now[name]]
    for module, was in zip(modules, before, strict=True):
        changed += differing(was, parts(module))
    assert changed == [], f"changed: {', '.join(changed)}"
