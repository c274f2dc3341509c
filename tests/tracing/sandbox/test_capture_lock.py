"""Captures beside other work in the same process, and in processes that others have patched."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import whence
from tests import zoo
from tests.checks import Backward, leaves_no_trace, same_bits
from tests.models import case
from whence.tracing.sandbox import capture_lock
from whence.tracing.sandbox.capture_lock import without_collection

WIDTH = zoo.WIDTH
PAUSE = 0.002
X = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))


def loss(output: Tensor) -> Tensor:
    return output.sin().mean()


class Recurrent(nn.Module):
    """An LSTM and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.norm(hidden)


class OwnDropout(nn.Module):
    """Drops with a generator of its own, and names its blocks in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.blocks: Any = nn.ModuleDict(
            {"first": nn.Sequential(zoo.Mlp()), "rest": nn.ModuleList([zoo.Mlp()])}
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks["first"]:
            x = block(x)
        x = x * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)
        for block in self.blocks["rest"]:
            x = block(x)
        return x


def dropping() -> nn.Module:
    """The only one that draws from the default generator, so its draws have one order."""
    return nn.Sequential(zoo.Mlp(dropout=0.3), nn.Dropout(0.5))


TRAINED: list[Callable[[], nn.Module]] = [Recurrent, OwnDropout, dropping]


@dataclass
class Training:
    """A model, its optimizer, and the losses of every step: the same numbers in every run."""

    build: Callable[[], nn.Module]
    losses: list[Tensor] = field(default_factory=list)

    def begin(self) -> None:
        torch.manual_seed(7)
        self.model = self.build().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        value = loss(self.model(X))
        value.backward()
        self.optimizer.step()
        self.losses.append(value.detach())

    def state(self) -> list[Tensor]:
        return [*self.losses, *self.model.state_dict().values()]


def alone(build: Callable[[], nn.Module], steps: int) -> list[Tensor]:
    """The numbers of so many steps with nothing beside them."""
    training = Training(build)
    training.begin()
    for _ in range(steps):
        training.step()
    return training.state()


@dataclass
class Worker:
    """Does something in a thread until it is told to end, with pauses in which others come forward."""

    work: Callable[[], None]
    pause: float = 0.0
    rounds: int = 0
    failed: list[BaseException] = field(default_factory=list)

    def run(self, end: threading.Event) -> None:
        while not end.wait(self.pause) and not self.failed:
            try:
                self.work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
                self.failed.append(error)
            self.rounds += 1


@contextmanager
def beside(workers: list[Worker]) -> Iterator[None]:
    """Run the workers beside the block."""
    end = threading.Event()
    threads = [threading.Thread(target=worker.run, args=(end,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert [error for worker in workers for error in worker.failed] == []


@dataclass(frozen=True)
class Captured:
    """Something to capture, and the pages of its programs when it is captured alone."""

    make: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    backward: Backward

    def page(self) -> str:
        model, args, kwargs = self.make()
        return str(whence.capture(model, args, kwargs, backward=self.backward))


class LazyMlp(nn.Module):
    """Gets its parameters from the example."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(WIDTH)
        self.block = zoo.Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


def rows() -> list[Captured]:
    gpt, shared, lstm, dropout = case("gpt2"), zoo.SharedLayer(), Recurrent(), zoo.Mlp(dropout=0.5)
    made = gpt.make()
    return [
        Captured(lambda: made, backward=False),
        Captured(lambda: made, gpt.loss),
        Captured(lambda: (shared, (X,), {}), backward=True),
        Captured(lambda: (lstm, (X,), {}), loss),
        Captured(lambda: (dropout, (X,), {}), loss),
    ]


def mixed_work(seconds: float) -> None:
    """Captures of every kind beside threads that train and run, until the time is over."""
    captured = rows()
    # PyTorch's cache of fake results gives an LSTM's two equal bias gradients apart from the second time on.
    pages = [[row.page() for row in captured] for _ in range(2)][-1]
    model, args, kwargs = captured[0].make()
    with torch.no_grad():
        expected = model(*args, **kwargs).logits

    def same_instance() -> None:
        with torch.no_grad():
            found = model(*args, **kwargs).logits
        if not same_bits(found, expected):
            raise AssertionError("the captured model gave other numbers")

    lstm, others = captured[3].make()[0], [Training(build) for build in TRAINED]
    for training in others:
        training.begin()
    torch.manual_seed(11)
    trained = [Worker(training.step, PAUSE) for training in others]
    workers = [Worker(same_instance, PAUSE), Worker(lambda: _keep(lstm), PAUSE), *trained]
    program = whence.capture(model, args, kwargs)
    end = time.monotonic() + seconds
    with beside(workers):
        while time.monotonic() < end or not all(worker.rounds for worker in workers):
            assert [row.page() for row in captured] == pages
            with suppress(ZeroDivisionError):
                whence.capture(lambda x: model(*args, **kwargs) and x / (1 // 0), (X,))
            assert program.check(model, args, kwargs) == []
    for training in others:
        again = Training(training.build)
        again.begin()
        torch.manual_seed(11)
        for _ in training.losses:
            again.step()
        assert all(map(same_bits, training.state(), again.state())), type(training.model)


def _keep(lstm: nn.Module) -> None:
    """Batch norm in training changes buffers, so the instance runs in eval mode, its mode left alone."""
    with torch.no_grad():
        next(lstm.children())(X)


@pytest.mark.sweep
def test_mixed_work() -> None:
    """A little of it: every number and every program is the one that it is alone."""
    mixed_work(0.2)


@pytest.mark.slow
def test_mixed_work_for_long() -> None:
    """Thirty seconds of it."""
    mixed_work(30)


def test_lazy_modules_beside_training() -> None:
    """A lazy module's parameters come out as alone, and the training beside it as well."""
    torch.manual_seed(0)
    expected = LazyMlp()
    expected(X)
    training = Training(OwnDropout)
    training.begin()
    worker = Worker(training.step)
    with beside([worker]):
        while not worker.rounds:
            torch.manual_seed(0)
            model = LazyMlp()
            whence.capture(model, (X,))
            assert torch.equal(model.first.weight, expected.first.weight)
    assert all(map(same_bits, training.state(), alone(OwnDropout, len(training.losses))))


def test_draws_of_other_threads_are_not_held_against_the_model() -> None:
    """Others draw from both default generators: the capture succeeds, and takes no draw back."""
    drawn: list[tuple[float, float]] = []
    worker = Worker(lambda: drawn.append((random.random(), float(torch.rand(1)))))
    torch.manual_seed(5)
    random.seed(5)
    with beside([worker]):
        while worker.rounds < 1000:
            whence.capture(zoo.Mlp(), (X,), backward=True)
    assert len({python for python, _ in drawn}) == len(drawn)


def draw() -> None:
    random.random()
    torch.rand(1)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "seed", [lambda: torch.manual_seed(0), lambda: random.seed(0)], ids=["torch", "python"]
)
def test_own_seeds_are_refused_beside_draws_of_others(seed: Callable[[], object]) -> None:
    """Whether or not other threads draw, a model that seeds is refused."""

    def seeding(x: Tensor) -> Tensor:
        seed()
        return x + 1

    worker = Worker(draw)
    with beside([worker]):
        for _ in range(20):
            with pytest.raises(whence.SideEffect):
                whence.capture(seeding, (X,))


# Two captures


class Threading(nn.Module):
    """Runs a block in a thread that its forward starts, and uses nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = zoo.Mlp()
        self.other = zoo.Mlp()
        self.found: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.put(type(self.other(X))))
        thread.start()
        thread.join()
        return self.block(x)


found: SimpleQueue[type] = SimpleQueue()


def test_thread_that_a_forward_starts() -> None:
    """What a thread of the model computes is real, and not part of the program."""
    program = whence.capture(Threading(), (X,))
    assert (found.get(), found.empty()) == (Tensor, True)
    assert "forward  block.up" in str(program)
    assert "forward  other" not in str(program)


class Counting(nn.Module):
    """Keeps a running value in a buffer that it assigns, as a capture must never see it half-way."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = zoo.Mlp()
        self.register_buffer("table", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table + 1
        return self.block(x) + self.table


@pytest.mark.sample(1)
@pytest.mark.parametrize("failing", [False, True], ids=["both right", "one fails"])
def test_two_captures_of_one_model(failing: bool) -> None:
    """Both programs are those of a capture alone, whether or not captures in the other thread fail."""
    model = Counting()
    expected = str(whence.capture(model, (X,), backward=True))
    pages: list[str] = []

    def other() -> None:
        if failing:
            with suppress(ZeroDivisionError):
                whence.capture(lambda x: model(x) / (1 // 0), (X,))
        else:
            pages.append(str(whence.capture(model, (X,), backward=True)))

    worker = Worker(other)
    with leaves_no_trace(model), beside([worker]):
        while worker.rounds < 10:
            pages.append(str(whence.capture(model, (X,), backward=True)))
    assert set(pages) == {expected}


# Processes that others have patched


class Plain(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PlainDispatch(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def patched_by_another(name: str) -> Iterator[None]:
    """Some other library stands in the way of a method of `nn.Module`."""
    had, before = name in vars(nn.Module), getattr(nn.Module, name)

    def standing_in_the_way(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs)

    setattr(nn.Module, name, standing_in_the_way)
    try:
        yield
    finally:
        assert vars(nn.Module)[name] is standing_in_the_way
        if had:
            setattr(nn.Module, name, before)
        else:
            delattr(nn.Module, name)


@contextmanager
def global_hook() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def traced_by(install: Callable[[Any], None], installed: Callable[[], Any]) -> Iterator[None]:
    """A debugger or a profiler is at work."""

    def nothing(*_: Any) -> None:
        """Follows nothing."""

    before = installed()
    install(nothing)
    try:
        yield
        assert installed() is nothing
    finally:
        install(before)


PROCESSES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "__call__": lambda: patched_by_another("__call__"),
    "__getattr__": lambda: patched_by_another("__getattr__"),
    "__setattr__": lambda: patched_by_another("__setattr__"),
    "__getattribute__": lambda: patched_by_another("__getattribute__"),
    "function mode": Plain,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "global hook": global_hook,
    "settrace": lambda: traced_by(sys.settrace, sys.gettrace),
    "setprofile": lambda: traced_by(sys.setprofile, sys.getprofile),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PROCESSES)
def test_patched_process(name: str) -> None:
    """A capture works there, and leaves what others have put up exactly as it is."""
    model = Counting()
    with PROCESSES[name]():
        with leaves_no_trace(model):
            program = whence.capture(model, (X,), backward=name != "no_grad")
        assert program.select("block.up")


@pytest.mark.parametrize("mode", [PlainDispatch, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_mode_of_another(mode: Callable[[], AbstractContextManager[object]]) -> None:
    """Under modes that may stand in the way of a recording, it succeeds or fails, and leaves nothing."""
    model = Counting()
    with mode(), leaves_no_trace(model), suppress(Exception):
        whence.capture(model, (X,))
    assert whence.capture(model, (X,)).verify(model, (X,)).ok


class Circle:
    """Holds itself, as graphs hold their nodes and these their graphs."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.sweep
@pytest.mark.parametrize("blocks", [1, 0], ids=["its own memory", "malloc"])
def test_what_nobody_holds_any_more_goes(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs thrown away one after the other: the collector does not count what it is told is old."""
    monkeypatch.setattr(capture_lock, "_old", capture_lock._Old())
    made: list[weakref.ref[Circle]] = []
    there = 200_000  # however much tests left
    count = lambda: blocks * (there + sum(ref() is not None for ref in made))  # noqa: E731
    monkeypatch.setattr(sys, "getallocatedblocks", count)
    for _ in range(4):
        without_collection(lambda: made.extend(weakref.ref(Circle()) for _ in range(100_000)))
    assert sum(ref() is not None for ref in made) <= 200_000
    assert gc.isenabled()
