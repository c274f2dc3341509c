"""The modes of the calling thread, looked at past all context managers.

An interrupt can hit a context manager, ours or torch's, after it has entered a mode and before it knows how
to leave it. So the stacks and flags themselves are kept, and put back as they were.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

from whence._torch.sizes.symbols import bookkeeping_is_undecided, leave_bookkeeping_undecided

Switches = Mapping[str, Any]
"""Switches of the process by name."""


def modes_restored() -> Callable[[], None]:
    """A way back to the modes that are active on this thread now."""
    operations, functions = _operation_modes(), overrides._get_current_function_mode_stack()
    settings = [(setting, setting.read()) for setting in _SETTINGS]
    keys = _keys()

    def restore() -> None:
        if _operation_modes() != operations:
            _refill(operations, torch._C._len_torch_dispatch_stack, dispatch._pop_mode, dispatch._push_mode)
        if overrides._get_current_function_mode_stack() != functions:
            _refill(functions, torch._C._len_torch_function_stack, overrides._pop_mode, overrides._push_mode)
        for setting, value in settings:
            if setting.read() != value:
                setting.write(value)
        _restore_keys(keys)
        _restore_autocast_nesting(nesting)

    nesting = _autocast_nesting()
    return restore


def modes_now() -> tuple[Any, ...]:
    """All that decides, besides its arguments, what an operation on this thread does."""
    return (
        *_operation_modes(),
        *overrides._get_current_function_mode_stack(),
        *(setting.read() for setting in _SETTINGS),
        torch.is_inference_mode_enabled(),
        *(setting.read() for setting in _SWITCHES.values()),
        *_keys(),
        _autocast_nesting(),
    )


@dataclass(frozen=True)
class _Setting:
    """A switch of this thread."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


_C: Any = torch._C  # not all of it is declared

_SETTINGS = (
    _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(torch.autograd.is_multithreading_enabled, torch.autograd.set_multithreading_enabled),
    _Setting(_C._get_torch_function_state, _C._set_torch_function_state),
    _Setting(torch._C._meta_in_tls_dispatch_include, torch._C._set_meta_in_tls_dispatch_include),
    _Setting(torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors),
    _Setting(bookkeeping_is_undecided, leave_bookkeeping_undecided),
    _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(
        setting
        for kind in ("cpu", "cuda")
        for setting in (
            _Setting(partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)),
            _Setting(partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)),
        )
    ),
)

_SWITCHES = {
    "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "matmul precision": _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "mkldnn": _Setting(_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    "flash attention": _Setting(_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    "memory-efficient attention": _Setting(_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    "plain attention": _Setting(_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    "cuDNN attention": _Setting(_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    "order of attention": _Setting(_C._get_sdp_priority_order, _C._set_sdp_priority_order),
}
"""Switches of the process that a model may turn while it runs, such as which attention is allowed."""


def switches() -> Switches:
    """How the switches of the process are that a model may turn while it runs."""
    return {name: setting.read() for name, setting in _SWITCHES.items()}


@contextmanager
def switched(values: Switches) -> Iterator[None]:
    """Turn some of them, and back afterwards."""
    before = [(_SWITCHES[name], _SWITCHES[name].read()) for name in values]
    try:
        for name, value in values.items():
            _SWITCHES[name].write(value)
        yield
    finally:
        for setting, value in before:
            setting.write(value)


def _operation_modes() -> list[Any]:
    return list(dispatch._get_current_dispatch_mode_stack())


def _refill(
    modes: list[Any], count: Callable[[], int], pop: Callable[[], Any], push: Callable[[Any], None]
) -> None:
    for _ in range(count()):
        pop()
    for mode in modes:
        push(mode)


def _keys() -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    """The dispatch keys that this thread adds to those of tensors, and those that it passes over."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _restore_keys(before: tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]) -> None:
    if _keys() == before:
        return
    included, excluded = before
    unnamed = [key for keys in _keys() for key in _members(keys)]  # an error in `torch.func` leaves some
    for key in (*torch._C.DispatchKey.__members__.values(), *unnamed):
        if torch._C._dispatch_tls_is_dispatch_key_included(key) != included.has(key):
            torch._C._dispatch_tls_set_dispatch_key_included(key, included.has(key))
        if torch._C._dispatch_tls_is_dispatch_key_excluded(key) != excluded.has(key):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded.has(key))


def _members(keys: torch._C.DispatchKeySet) -> Iterator[torch._C.DispatchKey]:
    """The keys of a set, also those that Python has no names for."""
    while keys.raw_repr():
        yield (key := keys.highestPriorityTypeId())
        before, keys = keys.raw_repr(), keys.remove(key)
        if keys.raw_repr() == before:
            return


def _autocast_nesting() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _restore_autocast_nesting(before: int) -> None:
    while _autocast_nesting() > before:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < before:
        torch.autocast_increment_nesting()
