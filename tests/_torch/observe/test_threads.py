"""PyTorch's tracers and its compiler take turns with a block, whichever begins first."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from whence._torch.observe.threads import tracers_take_turns

X = torch.ones(2)


def compiled() -> object:
    return torch.compile(lambda x: x.sin(), backend="eager")(X)


TRACERS: dict[str, Callable[[], object]] = {
    "symbolic_trace": lambda: fx.symbolic_trace(nn.ReLU()),
    "make_fx": lambda: make_fx(torch.sin)(X),
    "export": lambda: torch.export.export(nn.ReLU(), (X,)),
    "compile": compiled,
}


@pytest.mark.canary(
    "torch._dynamo.convert_frame.compile_lock",
    "torch.export._trace._export",
    "torch.fx.experimental.proxy_tensor._MakefxTracer._trace_inner",
)
@pytest.mark.parametrize("name", TRACERS)
def test_who_begins_in_another_thread_lets_the_block_end(name: str) -> None:
    """Once, from its own thread; not this thread, and nobody behind the block."""
    trace, told = TRACERS[name], list[int | None]()
    trace()  # what it needs is loaded
    torch.compiler.reset()
    with tracers_take_turns(lambda: told.append(threading.get_ident()), (), 0.0):
        thread = threading.Thread(target=trace)
        thread.start()
        thread.join()
    assert set(told) == {thread.ident}
    trace()
    assert set(told) == {thread.ident}


@pytest.mark.parametrize("is_waiting", [False, True])
def test_who_has_begun_is_waited_for(is_waiting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is done; but not a thread that waits for the block."""
    begun, go, pauses = threading.Event(), threading.Event(), list[float]()

    def traced(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        go.wait(10)
        return x.sin()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        go.set()

    thread = threading.Thread(target=lambda: make_fx(traced)(X))
    thread.start()
    begun.wait(10)
    monkeypatch.setattr(time, "sleep", pause)
    with tracers_take_turns(lambda: None, (traced.__code__,) if is_waiting else (), 10.0):
        assert bool(pauses) is not is_waiting
    go.set()
    thread.join()


@pytest.mark.canary("torch._dynamo.convert_frame.CatchErrorsWrapper")
def test_who_waits_for_the_compiler_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backend of this thread captures, it holds the compiler's lock."""
    compiled()
    waits, go, pauses = threading.Event(), threading.Event(), list[float]()

    def convert(_self: Any, *_frame: Any) -> None:
        waits.set()
        go.wait(10)

    convert_frame: Any = sys.modules["torch._dynamo.convert_frame"]
    monkeypatch.setattr(convert_frame.CatchErrorsWrapper, "__call__", convert)
    thread = threading.Thread(target=convert, args=(None,))
    thread.start()
    waits.wait(10)
    monkeypatch.setattr(time, "sleep", pauses.append)
    with convert_frame.compile_lock, tracers_take_turns(lambda: None, (), 10.0):
        assert pauses == []
    go.set()
    thread.join()
