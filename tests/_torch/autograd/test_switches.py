"""Canaries: the modes of a thread can be read and put back past their context managers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, overrides
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import whence
from whence._torch.autograd.switches import (
    SWITCHES,
    _settle_order,
    modes_now,
    modes_restored,
    switched,
    switches,
)

_C: Any = torch._C  # not all of it is declared


class Operations(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def thread_state() -> dict[str, Any]:
    """Everything that `modes_restored` promises to put back."""
    return {
        "operations": dispatch._get_current_dispatch_mode_stack(),
        "functions": overrides._get_current_function_mode_stack(),
        "included": str(torch._C._dispatch_tls_local_include_set()),
        "excluded": str(torch._C._dispatch_tls_local_exclude_set()),
        "meta": torch._C._meta_in_tls_dispatch_include(),
        "lift": torch._C._only_lift_cpu_tensors(),
        "function state": _C._get_torch_function_state(),
        "grad": torch.is_grad_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast nesting": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
    }


def in_a_kernel() -> None:
    torch._C._set_meta_in_tls_dispatch_include(True)


def excluding() -> None:
    torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView, True)


def including() -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(torch._C.DispatchKey.Functionalize, True)


def popping() -> None:
    dispatch._pop_mode()


def pushing() -> None:
    dispatch._push_mode(Operations())


def popping_functions() -> None:
    overrides._pop_mode()


def pushing_functions() -> None:
    overrides._push_mode(Functions())


def autocasting() -> None:
    torch.autocast("cpu", dtype=torch.float16, cache_enabled=False).__enter__()


CHANGES: list[Callable[[], object]] = [
    *(in_a_kernel, excluding, including, popping, pushing, popping_functions, pushing_functions, autocasting),
    *(
        FakeTensorMode().__enter__,
        partial(torch.set_grad_enabled, False),
        partial(torch.autograd.set_multithreading_enabled, False),
        partial(_C._set_torch_function_state, _C._TorchFunctionState.ALL_DISABLED),
        partial(torch._C._set_only_lift_cpu_tensors, True),
    ),
]


@contextmanager
def some_modes() -> Iterator[None]:
    """A mode of each kind, so that there is something to lose."""
    with Operations(), Functions():
        yield


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_left_behind_is_put_back(change: Callable[[], object]) -> None:
    """What a context manager entered and never left is left, twice in a row if need be."""
    with some_modes():
        before, restore = thread_state(), modes_restored()
        change()
        after = thread_state()
        restore()
        assert thread_state() == before
        assert after != before
        restore()
        assert thread_state() == before
        assert isinstance(torch.ones(2) + 1, Tensor)


@pytest.mark.canary("torch._C.DispatchKeySet")
@pytest.mark.canary(
    *("torch._C._dispatch_tls_is_dispatch_key_excluded", "torch._C._dispatch_tls_is_dispatch_key_included"),
    *("torch._C._dispatch_tls_set_dispatch_key_excluded", "torch._C._dispatch_tls_set_dispatch_key_included"),
    *("torch._C._get_torch_function_state", "torch._C._set_torch_function_state"),
    *("torch._C._meta_in_tls_dispatch_include", "torch._C._set_meta_in_tls_dispatch_include"),
    *("torch._C._only_lift_cpu_tensors", "torch._C._set_only_lift_cpu_tensors"),
    *("torch.overrides._pop_mode", "torch.overrides._push_mode"),
    *("torch.utils._python_dispatch._pop_mode", "torch.utils._python_dispatch._push_mode"),
)
def test_everything_left_behind_is_put_back() -> None:
    """All of it at once."""
    with some_modes():
        before, restore = thread_state(), modes_restored()
        for change in CHANGES:
            change()
        restore()
        assert thread_state() == before


def test_every_key_can_be_asked_about() -> None:
    """Each of `DispatchKey.__members__` is in a `DispatchKeySet` or not, and on this thread in or out."""
    included: torch._C.DispatchKeySet = torch._C._dispatch_tls_local_include_set()
    excluded: torch._C.DispatchKeySet = torch._C._dispatch_tls_local_exclude_set()
    for key in torch._C.DispatchKey.__members__.values():
        assert torch._C._dispatch_tls_is_dispatch_key_included(key) == included.has(key)
        assert torch._C._dispatch_tls_is_dispatch_key_excluded(key) == excluded.has(key)


@pytest.mark.canary(
    *("torch._C._set_mkldnn_enabled", "torch._C._get_flash_sdp_enabled", "torch._C._set_sdp_use_flash"),
    *("torch._C._get_mem_efficient_sdp_enabled", "torch._C._set_sdp_use_mem_efficient"),
    *("torch._C._get_math_sdp_enabled", "torch._C._set_sdp_use_math"),
    *("torch._C._get_cudnn_sdp_enabled", "torch._C._set_sdp_use_cudnn"),
    *("torch._C._get_sdp_priority_order", "torch._C._set_sdp_priority_order"),
)
@pytest.mark.parametrize(
    ("name", "read", "write", "other"),
    [
        ("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        (
            "deterministic algorithms",
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
            1,
        ),
        (
            "float32 matmul precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            "medium",
        ),
        ("mkldnn", _C._get_mkldnn_enabled, _C._set_mkldnn_enabled, False),
        ("order of attention", _C._get_sdp_priority_order, _C._set_sdp_priority_order, [2, 1, 0, 3, 4]),
    ],
)
def test_switch(name: str, read: Callable[[], Any], write: Callable[[Any], None], other: Any) -> None:
    """A switch that is turned makes the modes others; turned back, the same."""
    before, was = modes_now(), switches()
    assert was[name] == read() != other
    with switched({name: other}):
        assert read() == other
        assert modes_now() != before
        assert switches() == {**was, name: other}
    assert (modes_now(), switches()) == (before, was)
    write(other)
    try:
        assert switches()[name] == other
    finally:
        write(was[name])


KERNELS = {
    "flash": (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    "efficient": (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    "math": (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    "cudnn": (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
}


@pytest.mark.parametrize("name", KERNELS)
def test_attention_kernel(name: str) -> None:
    """One that is not allowed makes the modes others; allowed again, the same."""
    before, was = modes_now(), switches()
    others = tuple(other for other in KERNELS if other != name)
    with switched({"attention kernels": others}):
        assert [other for other, (is_enabled, _) in KERNELS.items() if is_enabled()] == list(others)
        assert modes_now() != before
    assert (modes_now(), switches()) == (before, was)
    KERNELS[name][1](False)
    try:
        assert switches()["attention kernels"] == others
    finally:
        KERNELS[name][1](True)


def test_precisions_of_backends_are_switches() -> None:
    """Set one by one, PyTorch has no single one; a capture works, and they are put back."""
    before = SWITCHES["float32 matmul precision"].read()
    matmul: Any = torch.backends.cuda.matmul
    try:
        matmul.fp32_precision = "tf32"
        now = SWITCHES["float32 matmul precision"].read()
        assert now == ("tf32", torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
        with switched({"float32 matmul precision": "high"}):
            assert torch.get_float32_matmul_precision() == "high"
        assert SWITCHES["float32 matmul precision"].read() == now
        model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
        program = whence.capture(model, (x,))
        assert program.verify(model, (x,)).ok
        matmul.fp32_precision = "ieee"
        assert "float32 matmul precision" in str(program.check(model, (x,)))
    finally:
        torch.set_float32_matmul_precision(str(before))


@pytest.mark.canary("torch._fused_sdp_choice")
def test_the_order_of_attention_is_settled_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch settles it in its first call there, which would look as if somebody had turned it."""
    asked: list[str] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: zeros(*args, **{**kwargs, "device": "cpu"}))
    choice = torch._fused_sdp_choice
    monkeypatch.setattr(
        torch, "_fused_sdp_choice", lambda *args: (asked.__setitem__(slice(0), ["asked"]), choice(*args))
    )
    _settle_order.cache_clear()
    try:
        for _ in range(2):
            assert SWITCHES["order of attention"].read() == _C._get_sdp_priority_order()
    finally:
        _settle_order.cache_clear()
    assert asked == ["asked"]
