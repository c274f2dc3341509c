"""Who hears a run knows who else does: afterwards nothing of that holds the model."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from tests.tracing.steps.small import zero_first, zero_last

X = torch.ones(3, 4)


class Deciding(nn.Module):
    """Takes a branch by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lin(x)
        return y if y.sum() > 0 else -y


class Failing(nn.Module):
    """Raises an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(self.lin(x).shape)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4), nn.ReLU())


def plain(model: nn.Module) -> Any:
    return whence.capture(model, (X,))


def joint(model: nn.Module) -> Any:
    program = whence.capture(model, (X,), backward=True)
    return program, program.verify(model, (X,))


def of_open_sizes(model: nn.Module) -> Any:
    return whence.capture(model, (X,), dynamic_shapes=({0: Dim("rows")},))


def decided(model: nn.Module) -> Any:
    return whence.capture(nn.Sequential(model, Deciding()), (X,), decide="example")


def called(model: nn.Module) -> Any:
    program = whence.capture(model, (X,))
    return program.guarded(model)(X), program.check(model, (X,)), str(program)


def exported(model: nn.Module) -> Any:
    return whence.capture(model, (X,)).to_exported_program()


def step(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    program = whence.capture_step(zero_first(model, optimizer), (X,), model=model, optimizer=optimizer)
    return program.bind(model, optimizer)(X)


def guarded(on_violation: Any) -> Callable[[nn.Module], Any]:
    def stale(model: nn.Module) -> Any:
        call = whence.capture(model, (X,)).guarded(model, on_violation=on_violation)
        model.eval()
        with suppress(whence.StaleCapture), warnings.catch_warnings(action="ignore"):
            call(X)
        return call

    stale.__name__ = f"guarded_{on_violation}"
    return stale


def decided_otherwise(model: nn.Module) -> Any:
    call = whence.capture(nn.Sequential(model, Deciding()), (X,), decide="example")
    return call.guarded(nn.Sequential(model, Deciding()), on_violation="recapture")(-X)


def cached(model: nn.Module) -> Any:
    with TemporaryDirectory() as folder:
        return [whence.cached(model, (X,), directory=folder) for _ in range(2)]


def initialised(model: nn.Module) -> Any:
    return whence.capture(nn.Sequential(model, nn.LazyLinear(3)), (X,))


def second_step(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = zero_first(model, optimizer)
    program = whence.capture_step(train, (X,), model=model, optimizer=optimizer)
    return program, program.verify(model, (X,))


def several_backwards(model: nn.Module) -> Any:
    optimizer = torch.optim.Adam(model.parameters())

    def train(x: Tensor) -> None:
        for _ in range(2):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return whence.capture_step(train, (X,), model=model, optimizer=optimizer)


def stale_step(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    program = whence.capture_step(zero_first(model, optimizer), (X,), model=model, optimizer=optimizer)
    call = program.bind(model, optimizer)
    model.eval()
    with suppress(whence.StaleCapture):
        call(X)
    return call


def specialised(model: nn.Module) -> Any:
    with suppress(whence.SpecialisedShapes):
        whence.capture(
            nn.Sequential(model, nn.Unflatten(0, (3, 1))), (X,), dynamic_shapes=({0: Dim("rows")},)
        )


class Layer(nn.Module):
    """One of many that are equal, of which most are replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def step_of_layers(model: nn.Module) -> Any:
    """Is captured twice: the first attempt, with autograd's nodes of replayed layers, is thrown away."""
    whole = nn.Sequential(model, *(Layer() for _ in range(4)))
    optimizer = torch.optim.AdamW(whole.parameters())
    train = zero_last(whole, optimizer)
    return whence.capture_step(train, (X,), model=whole, optimizer=optimizer)


def refused(model: nn.Module) -> Any:
    with suppress(whence.CaptureError):
        whence.capture(nn.Sequential(model, Deciding()), (X,))


def failed(model: nn.Module) -> Any:
    with suppress(ValueError):
        whence.capture(nn.Sequential(model, Failing()), (X,))


def test_what_others_put_back_afterwards_does_nothing() -> None:
    """As `torch.fx` does, which another thread began while the model was captured: it found our patches."""
    found: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    own = nn.Module.__getattr__, nn.Module.__call__

    def set_both(both: tuple[Any, Any]) -> None:
        nn.Module.__getattr__, nn.Module.__call__ = both  # type: ignore[method-assign]

    class Tracing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = Thread(target=begin)
            thread.start()
            thread.join()
            return x.sin()

    def begin() -> None:
        found.put((nn.Module.__getattr__, nn.Module.__call__))
        set_both(own)

    layer = nn.Linear(4, 4)
    expected, model = layer(X), nn.Sequential(layer, Tracing())
    program = whence.capture(model, (X,))
    try:
        set_both(found.get())
        assert torch.equal(layer(X), expected) and not hasattr(layer, "nothing")
        assert program.check(model, (X,)) == []
        whence.capture(layer, (X,))
        assert (nn.Module.__getattr__, nn.Module.__call__) == own
    finally:
        set_both(own)


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.disable()
    logging.disable()  # pytest keeps what is logged, with what it speaks of
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize(
    "use",
    [
        *(
            plain,
            joint,
            of_open_sizes,
            decided,
            called,
            exported,
            step,
            step_of_layers,
            refused,
            failed,
            decided_otherwise,
        ),
        *(cached, initialised, second_step, several_backwards, stale_step, specialised),
        *map(guarded, ("raise", "warn", "recapture")),
    ],
    ids=lambda use: use.__name__,
)
def test_a_model_goes_when_nobody_holds_it(use: Callable[[nn.Module], Any]) -> None:
    """Its weights go at once, and not when Python's collector comes by."""
    model = sequential()
    found, weight = use(model), ref(next(model.parameters()))
    del found, model
    assert weight() is None
