"""An interrupt, wherever and whenever it comes, leaves nothing behind."""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import whence
from tests.checks import Backward, leaves_no_trace, parts, surroundings
from tests.tracing.interrupting import CAREFUL, EVERYWHERE, Busy, Interruption, Lazy, X, loss, steps_of
from whence._torch.record import adopted
from whence._torch.subclasses.lazy_modules import is_waiting


class Stop(BaseException):
    """No `Exception`, as `GeneratorExit` is none."""


KINDS = [KeyboardInterrupt, SystemExit, GeneratorExit, Stop]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The busy model keeps fake tensors, which is warned about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.fixture(autouse=True)
def _interrupts_arrive() -> Iterator[None]:
    """A shell lets what it runs in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@dataclass
class Raising:
    """Raises when it is called."""

    kind: type[BaseException]

    def __call__(self, *_: Any) -> Any:
        raise self.kind


class Box:
    """A class of the user that pytree knows."""

    raising: Raising | None = None

    def __init__(self, content: Tensor) -> None:
        self.content = content


def flatten(box: Box) -> tuple[list[Any], None]:
    if Box.raising is not None:
        Box.raising()
    return [box.content], None


pytree.register_pytree_node(Box, flatten, lambda parts, _: Box(*parts), serialized_type_name="tests.Box")


class Boxing(Busy):
    """Returns a box."""

    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class Asking(Busy):
    """Has attributes that nobody set."""

    raising: Raising | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "nothing" and Asking.raising is not None:
            Asking.raising()
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.nothing


class Cubed(torch.autograd.Function):
    """Raises in its backward."""

    raising: Raising | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if Cubed.raising is not None:
            Cubed.raising()


class Differentiating(Busy):
    """Ends in a custom function."""

    def forward(self, x: Tensor) -> Tensor:
        return Cubed.apply(super().forward(x))


class Ending(Busy):
    """Raises at the end of its forward."""

    raising: Raising | None = None

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if Ending.raising is not None:
            Ending.raising()
        return result


class Hooked(Busy):
    """Raises in a hook on an activation."""

    raising: Raising | None = None

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if Hooked.raising is not None:
            result.register_hook(Hooked.raising)
        return result


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [Boxing, Asking, Differentiating, Ending, Hooked])
def test_raised_in_the_model(
    build: type[Busy], kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward, in pytree, in `__getattr__`, in a hook on a tensor, in a custom function's backward."""
    holder: Any = {Boxing: Box, Differentiating: Cubed}.get(build, build)
    model = build()
    monkeypatch.setattr(holder, "raising", Raising(kind))
    with leaves_no_trace(model), pytest.raises(kind):
        whence.capture(model, (X,), backward=lambda found: loss(getattr(found, "content", found)))
    captured_as_ever()


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", range(6))
def test_raised_in_a_hook_of_a_module(position: int, kind: type[BaseException]) -> None:
    """In a forward hook, on any module."""
    model = Busy()
    list(model.modules())[position].register_forward_hook(Raising(kind))
    if isinstance(list(model.modules())[position], nn.ModuleDict):
        return
    with leaves_no_trace(model), pytest.raises(kind):
        whence.capture(model, (X,), backward=True)
    captured_as_ever()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_raised_in_the_loss(kind: type[BaseException]) -> None:
    """In the function that the caller gave."""
    model = Busy()
    with leaves_no_trace(model), pytest.raises(kind):
        whence.capture(model, (X,), backward=Raising(kind))
    captured_as_ever()


class Initialising(nn.LazyLinear):
    """Raises when its parameters have been made."""

    kind: type[BaseException] = Stop

    def initialize_parameters(self, *args: Any) -> None:
        super().initialize_parameters(*args)
        raise self.kind


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_raised_while_a_lazy_module_is_initialised(kind: type[BaseException]) -> None:
    """The module is lazy again, and the rest as before."""
    model = Lazy()
    model.first = Initialising(4)
    model.first.kind = kind
    before = torch.get_rng_state()
    with leaves_no_trace(model.busy):
        with pytest.raises(kind):
            whence.capture(model, (X,))
        torch.set_rng_state(before)  # the parameters were drawn
    assert is_waiting(model.first)
    captured_as_ever()


def captured_as_ever(backward: Backward = loss) -> None:
    """A capture after an interrupt is a capture: the lock is free, and the program right."""
    model = Busy().eval()
    assert whence.capture(model, (X,), backward=backward).verify(model, (X,)).ok


@dataclass
class Sweep:
    """Captures, each interrupted at another step; what was left behind."""

    build: Callable[[], nn.Module]
    backward: Backward
    instructions: bool
    left: list[str] = field(default_factory=list)

    def run(self, moments: int) -> None:
        """Interrupt at this many moments, chosen once and for all."""
        files = CAREFUL if self.instructions else EVERYWHERE
        self._capture(self.build())
        steps = steps_of(lambda: self._capture(self.build()), files, instructions=self.instructions)
        chosen = random.Random(moments).sample(range(1, steps + 1), min(moments, steps))
        for at in chosen:
            self._interrupt(Interruption(at, files, self.instructions))

    def _capture(self, model: nn.Module) -> None:
        whence.capture(model, (X,), backward=self.backward)

    def _interrupt(self, interruption: Interruption) -> None:
        model = self.build()
        settled = model.busy if isinstance(model, Lazy) else model
        before, hooks = parts(settled), lazy_parts(model)
        outside = surroundings()
        with suppress(KeyboardInterrupt, whence.CaptureError), interruption.running():
            self._capture(model)
        drawn = {"torch generator"} if isinstance(model, Lazy) else set[str]()  # its parameters are real
        now = surroundings()
        changed = [name for name in outside.keys() - drawn if outside[name] != now[name]]
        changed += [name for name, value in parts(settled).items() if not same(before[name], value)]
        changed += ["lazy module"] if lazy_parts(model) not in (hooks, []) else []
        self.left += [f"{name} after {interruption.where}" for name in changed]


def same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


def lazy_parts(model: nn.Module) -> list[Any]:
    """What the lazy modules that still wait consist of; nothing once all are initialised."""
    waiting = [module for module in model.modules() if is_waiting(module)]
    return [(type(m), {**vars(m)}, list(m._forward_pre_hooks.values()), list(m._parameters)) for m in waiting]


@pytest.mark.sample(1)
@pytest.mark.parametrize("instructions", [False, True], ids=["lines", "instructions"])
@pytest.mark.parametrize("backward", [False, loss], ids=["forward", "loss"])
@pytest.mark.parametrize("build", [Busy, Lazy])
def test_interrupt_at_any_moment(
    build: Callable[[], nn.Module], backward: Backward, instructions: bool
) -> None:
    """At any line of whence, and between any two instructions of what patches and undoes."""
    sweep = Sweep(build, backward, instructions)
    sweep.run(4)
    assert sweep.left == []
    captured_as_ever()


@pytest.mark.slow
@pytest.mark.parametrize("instructions", [False, True], ids=["lines", "instructions"])
@pytest.mark.parametrize("backward", [False, loss], ids=["forward", "loss"])
@pytest.mark.parametrize("build", [Busy, Lazy])
def test_interrupt_at_very_many_moments(
    build: Callable[[], nn.Module], backward: Backward, instructions: bool
) -> None:
    """The same, four hundred times each."""
    sweep = Sweep(build, backward, instructions)
    sweep.run(400)
    assert sweep.left == []


@contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    """Press Ctrl-C once, at a moment of the clock's choosing."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pressed(captures: int, seed: int) -> int:
    """Press Ctrl-C in so many captures of one model, which must stay as it is; how many it stopped."""
    model, moments, stopped = Busy(), random.Random(seed), 0
    whence.capture(model, (X,), backward=loss)
    for _ in range(captures):
        with leaves_no_trace(model):
            try:
                with ctrl_c_after(moments.uniform(0.0001, 0.02)):
                    whence.capture(model, (X,), backward=loss)
            except KeyboardInterrupt:
                stopped += 1
    return stopped


def test_ctrl_c_at_any_time() -> None:
    """Pressed at random during 20 captures of one model, it stops some, and leaves nothing behind."""
    assert pressed(20, seed=0) > 0
    captured_as_ever()


@pytest.mark.slow
def test_ctrl_c_very_often() -> None:
    """The same, 1000 times."""
    assert pressed(1000, seed=1) > 0


def press() -> None:
    signal.raise_signal(signal.SIGINT)


class Pressing(nn.Module):
    """Presses Ctrl-C so many times while it runs, and notes how far it comes."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.times = times
        self.reached: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            press()
        reached.put("after Ctrl-C")
        hidden: Tensor = self.linear(x)
        reached.put("after the next module")
        return hidden


reached: SimpleQueue[str] = SimpleQueue()
"""What a capture leaves as it is: it gives lists back as they were."""


@pytest.mark.parametrize(("times", "expected"), [(0, 2), (1, 1), (2, 0)])
def test_ctrl_c_waits_for_the_next_module(times: int, expected: int) -> None:
    """Pressed once it is let in where the next module is called, pressed twice it comes at once."""
    before = reached.qsize()
    model = Pressing(times)
    with leaves_no_trace(model), suppress(KeyboardInterrupt):
        whence.capture(model, (X,))
    assert reached.qsize() - before == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_the_end_is_not_lost() -> None:
    """Pressed after the last operation, it still comes."""

    def pressing_loss(output: Tensor) -> Tensor:
        result = output.sum()
        result.register_hook(lambda _: press())
        return result

    model = nn.Linear(4, 4)
    with leaves_no_trace(model), pytest.raises(KeyboardInterrupt):
        whence.capture(model, (X,), backward=pressing_loss)


def test_own_handler_of_interrupts_stays() -> None:
    """Where a program handles Ctrl-C itself, a capture does not come between."""
    pressed_at: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed_at.append(number))
    try:
        whence.capture(Pressing(1), (X,))
    finally:
        signal.signal(signal.SIGINT, before)
    assert {*pressed_at} == {signal.SIGINT}


@dataclass
class InterruptedOnEntry:
    """A context manager that puts a mode aside, and is interrupted before it can be left again."""

    putting_aside: Any

    def __enter__(self) -> None:
        self.putting_aside.__enter__()
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        """Never called."""


@pytest.mark.parametrize("name", ["disable_proxy_modes_tracing", "unset_fake_temporarily"])
def test_interrupted_where_a_mode_is_put_aside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes out, not that a mode was missing where it is left."""
    model = Busy()
    putting_aside = getattr(adopted, name)
    with leaves_no_trace(model), monkeypatch.context() as patches:
        patches.setattr(adopted, name, lambda: InterruptedOnEntry(putting_aside()))
        with pytest.raises(KeyboardInterrupt):
            whence.capture(model, (X,))
    captured_as_ever()
