"""Canaries: what we rely on in `torch.utils.checkpoint`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    _CheckpointFrame,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
)

from whence._torch.observe.checkpoints import checkpoints_as_in_eager, observed_checkpoints
from whence._torch.record.annotations import annotations_restored


class Observer:
    """Notes when regions begin, and when they run again."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def checkpoint_starts(self, rewinds: bool) -> Callable[[], AbstractContextManager[None]]:
        self.events.append("starts" if rewinds else "starts without rewinding")
        return self._around

    @contextmanager
    def _around(self) -> Iterator[None]:
        self.events.append("again")
        try:
            yield  # PyTorch leaves by an exception as soon as it has what it needs
        finally:
            self.events.append("done")


def region(x: Tensor) -> Tensor:
    return x.sin().cos()


def run(times: int = 1) -> Tensor:
    x = torch.ones(3, requires_grad=True)
    for _ in range(times):
        x = checkpoint(region, x, use_reentrant=False)
    return x.sum()


def test_region_is_seen_to_begin() -> None:
    """A `_CheckpointFrame` is made for every region, when it starts."""
    observer = Observer()
    with observed_checkpoints(observer):
        run(times=2)
    assert observer.events == ["starts", "starts"]


@pytest.mark.canary(
    "torch.utils.checkpoint._CachingTorchDispatchMode", "torch.utils.checkpoint._is_compiling"
)
def test_selective_checkpoints_are_those_of_eager() -> None:
    """Under a tracer, a `_CachingTorchDispatchMode` finds that it `_is_compiling` and keeps everything; here
    the nodes still get what the policy says, of which a bool is one, too."""

    def kept(_: Any, operator: Any, *__: Any, **___: Any) -> bool:
        return operator is torch.ops.aten.sin.default

    def computed(x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, kept)
        found = checkpoint(lambda x: region(x).exp(), x, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(found.sum(), x)[0]

    def exponentials(around: AbstractContextManager[None]) -> int:
        restore = annotations_restored()  # PyTorch leaves there what it says of the operations
        with around:
            graph = make_fx(computed)(torch.ones(3, requires_grad=True)).graph
        restore()
        return len(graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default))

    assert exponentials(nullcontext()) == 1
    assert exponentials(checkpoints_as_in_eager(fx.Graph())) == 2


def test_recomputation_is_seen() -> None:
    """The function that the frame was given runs the region again, inside the observer's context."""
    observer = Observer()
    with observed_checkpoints(observer):
        run().backward()
    assert observer.events == ["starts", "again", "done"]


def test_recomputation_is_seen_after_the_block() -> None:
    """A frame made inside the block reports a recomputation that happens after it."""
    observer = Observer()
    with observed_checkpoints(observer):
        value = run()
    value.backward()
    assert observer.events == ["starts", "again", "done"]


def test_other_threads_are_not_seen() -> None:
    """A checkpoint of another thread is not reported."""
    observer = Observer()
    with observed_checkpoints(observer):
        thread = threading.Thread(target=lambda: run().backward())
        thread.start()
        thread.join()
    assert observer.events == []


@pytest.mark.canary(
    "torch.utils.checkpoint._CheckpointFrame",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator.preserve_rng_state",
)
def test_patch_is_taken_off() -> None:
    """Afterwards the frame's constructor is PyTorch's own."""
    before = _CheckpointFrame.__init__
    with observed_checkpoints(Observer()):
        assert _CheckpointFrame.__init__ is not before
    assert _CheckpointFrame.__init__ is before


def test_debug_mode_still_works() -> None:
    """PyTorch's checkpoint debugging works under observation."""
    with observed_checkpoints(Observer()), set_checkpoint_debug_enabled(False):
        run().backward()
