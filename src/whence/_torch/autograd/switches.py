"""The modes of the calling thread, looked at past all context managers.

An interrupt can hit a context manager, ours or torch's, after it has entered a mode and before it knows how
to leave it. So the stacks and flags themselves are kept, and put back as they were.
"""

import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import is_inference_mode_enabled, overrides
from torch.utils import _python_dispatch as dispatch

from whence._torch.sizes.symbols import bookkeeping_is_undecided, leave_bookkeeping_undecided
from whence._torch.tensors import active_modes, autocast_state, default_device

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
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        while _autocast_nesting() < nesting:
            torch.autocast_increment_nesting()

    nesting = _autocast_nesting()
    return restore


@contextmanager
def modes_found_again() -> Iterator[None]:
    """An interrupt finds the modes at the end of the block as they were at its beginning.

    It may have hit the context manager that put one aside, and a mode that is not there cannot be left.
    """
    restore = modes_restored()

    def restore_after_interrupt(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            restore()

    with ExitStack() as leaving:
        leaving.push(restore_after_interrupt)
        yield


def modes_now() -> tuple[Any, ...]:
    """All that decides, besides its arguments, what an operation on this thread does."""
    return (
        *_operation_modes(),
        *overrides._get_current_function_mode_stack(),
        *(setting.read() for setting in _SETTINGS),
        is_inference_mode_enabled(),
        *(switch.read() for switch in SWITCHES.values()),
        *_keys(),
        _autocast_nesting(),
    )


@dataclass(frozen=True)
class Switch:
    """A switch: how it is read, how it is turned, and what it decides, where it decides what is computed.

    What is recorded `follows` it where operators are chosen by it; others decide in the operators themselves.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    reason: str = ""
    follows: bool = False


_C: Any = torch._C  # not all of it is declared

_SETTINGS = (
    Switch(torch.is_grad_enabled, torch.set_grad_enabled),
    Switch(torch.autograd.is_multithreading_enabled, torch.autograd.set_multithreading_enabled),
    Switch(_C._get_torch_function_state, _C._set_torch_function_state),
    Switch(torch._C._meta_in_tls_dispatch_include, torch._C._set_meta_in_tls_dispatch_include),
    Switch(torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors),
    Switch(bookkeeping_is_undecided, leave_bookkeeping_undecided),
    Switch(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(
        switch
        for kind in ("cpu", "cuda")
        for switch in (
            Switch(partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)),
            Switch(partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)),
        )
    ),
)
"""Switches of this thread."""

_KERNELS = {
    "flash": (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    "efficient": (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    "math": (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    "cudnn": (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
}


def _attention_kernels() -> tuple[str, ...]:
    """The kernels that scaled_dot_product_attention may choose among."""
    return tuple([name for name, (is_enabled, _) in _KERNELS.items() if is_enabled()])


def _allow_kernels(names: Container[str]) -> None:
    for name, (_, enable) in _KERNELS.items():
        enable(name in names)


_BACKENDS: Any = torch.backends  # not all of it is declared
_OF_PRODUCTS = (_BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul)


def _matmul_precision() -> str | tuple[str, ...]:
    """One for all, or those of CUDA and oneDNN where they were set one by one: PyTorch then has no other."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return tuple([each.fp32_precision for each in _OF_PRODUCTS])


def _set_matmul_precision(value: str | tuple[str, ...]) -> None:
    if isinstance(value, str):
        torch.set_float32_matmul_precision(value)
        return
    torch.set_float32_matmul_precision("highest")
    for each, precision in zip(_OF_PRODUCTS, value, strict=True):
        each.fp32_precision = precision


def _order_of_attention() -> list[int]:
    """The order in which kernels of attention are asked; PyTorch settles it at its first call on a device."""
    if torch.cuda.is_initialized():
        _settle_order()
    return _C._get_sdp_priority_order()  # type: ignore[no-any-return]


@cache
def _settle_order() -> None:
    with dispatch._disable_current_modes(), torch.no_grad():
        tensor = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(tensor, tensor, tensor)


_TORCH_S_LOGGERS = ("torch", "c10d", "strobelight")


def _levels_of_loggers() -> str:
    """The level of each logger that has one of its own, but for torch's, and what is logged nowhere."""
    known = logging.root.manager.loggerDict
    rows = [("root", logging.root.level), ("disabled", logging.root.manager.disable)]
    rows += [(name, each.level) for name, each in sorted(known.items()) if isinstance(each, logging.Logger)]
    others = [(name, level) for name, level in rows if level and not name.startswith(_TORCH_S_LOGGERS)]
    return ", ".join(f"{name} {logging.getLevelName(level)}" for name, level in others)


SWITCHES = {
    "default dtype": Switch(
        torch.get_default_dtype, torch.set_default_dtype, "tensors made inside the model have it"
    ),
    "deterministic algorithms": Switch(
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        "operators choose another kernel, and refuse some",
    ),
    "float32 matmul precision": Switch(
        _matmul_precision, _set_matmul_precision, "the last bits of matrix products depend on it"
    ),
    "mkldnn": Switch(
        _C._get_mkldnn_enabled, _C._set_mkldnn_enabled, "another kernel adds up in another order"
    ),
    "attention kernels": Switch(
        _attention_kernels, _allow_kernels, "another kernel adds up in another order", follows=True
    ),
    "fast path of encoders": Switch(
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
        "encoder layers and attention run as one operator without gradients",
        follows=True,
    ),
    "order of attention": Switch(
        _order_of_attention, _C._set_sdp_priority_order, "the first kernel that can is taken", follows=True
    ),
}
"""Switches of the process that a model may turn while it runs."""

_INSIDE = [(name, switch.read) for name, switch in SWITCHES.items() if not switch.follows]

READ: dict[str, tuple[Callable[[], Any], str]] = {
    "grad mode": (torch.is_grad_enabled, "modules branch on it, and gradients end where it is off"),
    "inference mode": (torch.is_inference_mode_enabled, "modules branch on it, and tensors have no history"),
    "autocast": (autocast_state, "the casts it makes are operations of the program"),
    "default device": (default_device, "tensors made inside the model are put there"),
    "modes of torch": (active_modes, "they see every operation, and may change it"),
    **{name: (switch.read, switch.reason) for name, switch in SWITCHES.items()},
}
"""All that decides, besides its arguments, what an operation computes: how it is read, and why it matters."""

_BRANCHES = "modules branch on it"
READ_BY_NAME: dict[str, tuple[Callable[[], Any], str, frozenset[str]]] = {
    "inference mode": (*READ["inference mode"], frozenset({"is_inference_mode_enabled"})),
    "number of threads": (torch.get_num_threads, _BRANCHES, frozenset({"get_num_threads"})),
    "number of threads between operations": (
        *(torch.get_num_interop_threads, _BRANCHES, frozenset({"get_num_interop_threads"})),
    ),
    "levels of loggers": (
        *(_levels_of_loggers, _BRANCHES, frozenset({"getLogger", "isEnabledFor", "getEffectiveLevel"})),
    ),
    "working directory": (os.getcwd, _BRANCHES, frozenset({"getcwd", "cwd"})),
}
"""What no operation looks at: it matters where code asks for it, by one of these names."""


def _kernels_of_cudnn() -> str:
    cudnn: Any = torch.backends.cudnn
    rows = {name: getattr(cudnn, name) for name in ("enabled", "deterministic", "benchmark")}
    rows |= {"conv": cudnn.conv.fp32_precision, "rnn": cudnn.rnn.fp32_precision}
    return _in_words(rows)


def _reduced_precision() -> str:
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    return _in_words(
        {name: getattr(torch.backends.cuda.matmul, name) for name in (*names, "allow_fp16_accumulation")}
    )


def _in_words(rows: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in rows.items())


READ_ON_CUDA: dict[str, tuple[Callable[[], Any], str]] = {
    "kernels of cuDNN": (_kernels_of_cudnn, "another kernel adds up in another order"),
    "reduced precision of products": (_reduced_precision, "sums of products are rounded on the way"),
}
"""What kernels of a CUDA device look at."""


def switches() -> Switches:
    """How the switches of the process are that a model may turn while it runs."""
    return {name: setting.read() for name, setting in SWITCHES.items()}


def turned_inside(before: Switches) -> list[str]:
    """The switches that operators look at themselves, and that are otherwise than before."""
    return [name for name, read in _INSIDE if read() != before[name]]


@contextmanager
def switched(values: Switches) -> Iterator[None]:
    """Turn some of them, and back afterwards."""
    before = [(SWITCHES[name], SWITCHES[name].read()) for name in values]
    try:
        for name, value in values.items():
            SWITCHES[name].write(value)
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
