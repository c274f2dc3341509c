"""Coin flips of torch, Python and NumPy decide as other values do, and every run draws them as eager does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import random as flip
from time import perf_counter
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whence
from tests.behaviours.constructions import generators, seeded
from tests.checks import differing, state

X = torch.arange(8.0).view(2, 4) / 4


class Flipping(nn.Module):
    """Two ways, by a coin; it counts its calls."""

    calls: Tensor

    def __init__(self, coin: Callable[[], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.coin, self.heads, self.tails = coin, nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + torch.rand(4)
        return self.heads(x) if self.coin() else self.tails(x) * 2


def of_torch() -> bool:
    return bool(torch.rand(()) < 0.5)


def of_python() -> bool:
    return bool(random.random() < 0.5)


def of_python_by_name() -> bool:
    return bool(flip() < 0.5)


def of_numpy() -> bool:
    return bool(np.random.uniform(0, 1) < 0.5)


def of_choice() -> bool:
    return random.choice([True, False])


def of_shuffle() -> bool:
    order = [True, False, True]
    random.shuffle(order)
    return order[0]


def of_sample() -> bool:
    return bool(random.sample([1, 2, 3, 4], 2)[1] > 2)


COINS = [of_torch, of_python, of_python_by_name, of_numpy, of_choice, of_shuffle, of_sample]
EVERY = pytest.mark.parametrize("coin", COINS, ids=lambda coin: coin.__name__)


def seed_of(coin: Callable[[], bool], side: bool) -> int:
    """A seed from which a model flips this side."""
    for seed in range(50):
        seeded(seed)
        torch.rand(4)
        if coin() is side:
            return seed
    raise AssertionError


def captured(coin: Callable[[], bool]) -> tuple[Flipping, whence.Program]:
    model = Flipping(coin)
    seeded(seed_of(coin, True))
    before = generators()
    program = whence.capture(model, (X,), decide="example")
    assert differing(before, generators()) == []
    return model, program


@EVERY
def test_a_coin_decides(coin: Callable[[], bool]) -> None:
    """The program says that it was drawn, is eager from where eager draws the same, and no guard is false."""
    model, program = captured(coin)
    assert all(decision.drawn for decision in program.decisions)
    assert "drawn at random" in str(program.decisions[0])
    assert coin.__name__ in str(program.decisions[0])
    result = program.verify(model, (X,))
    assert result.ok, str(result)
    assert program.check(model, (X,)) == []


@EVERY
def test_the_other_side_is_refused(coin: Callable[[], bool]) -> None:
    """The error names the line and both answers, and nothing is written."""
    model, program = captured(coin)
    for run in (program.module(), program.unflatten(), program.bind(model)):
        before = state(model)
        seeded(seed_of(coin, False))
        with pytest.raises(whence.StaleCapture, match="at capture") as caught:
            run(X)
        assert caught.value.where.line is not None
        assert coin.__name__ in caught.value.where.line
        assert differing(before, state(model)) == []


@pytest.mark.sample(2)
@EVERY
def test_a_program_for_each_side(coin: Callable[[], bool]) -> None:
    """A guarded program keeps both, and draws as eager does, whichever it tries first."""
    model, program = captured(coin)
    eager = Flipping(coin)
    guarded = program.guarded(model, "recapture")
    for seed in range(12):
        seeded(seed)
        expected = eager(X)
        there = generators()
        seeded(seed)
        assert torch.equal(guarded(X), expected), seed
        assert differing(there, generators()) == []
    assert differing(state(eager), state(model)) == []
    assert len(guarded.programs) > 1


@pytest.mark.parametrize("coin", [of_python, of_numpy], ids=lambda coin: coin.__name__)
def test_nobody_decides_unasked(coin: Callable[[], bool]) -> None:
    """The refusal names the line and the remedy."""
    with pytest.raises(whence.SideEffect, match="draws from") as caught:
        whence.capture(Flipping(coin), (X,))
    assert 'decide="example"' in (caught.value.remedy or "")
    assert coin.__name__ in str(caught.value.where.line)


def test_the_call_is_spelled() -> None:
    """A decision says what was called."""
    asked = [captured(coin)[1].decisions[0].asked for coin in (of_python, of_numpy)]
    assert asked == ["random.random() < 0.5", "numpy.random.uniform(0, 1) < 0.5"]


def test_a_number_that_decides_nothing_is_drawn() -> None:
    """It is no decision: every run draws its own."""

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * np.random.beta(2.0, 2.0) * random.randint(1, 3)

    model = Scaled(4, 4)
    program = whence.capture(model, (X,), decide="example")
    assert program.decisions == ()
    for seed in range(5):
        seeded(seed)
        expected = model(X)
        seeded(seed)
        assert torch.equal(program.module()(X), expected)


class Drawing(nn.Linear):
    """Draws something that no program holds."""

    def __init__(self, draw: Callable[[], object]) -> None:
        super().__init__(4, 4)
        self.draw = draw

    def forward(self, input: Tensor) -> Tensor:
        self.draw()
        random.random()
        return super().forward(input)


def drawn_by_default(draw: Callable[[], float] = random.random) -> float:
    """As generated code draws that keeps a function in a default argument (beartype)."""
    return draw()


@pytest.mark.parametrize(
    "draw",
    [lambda: random.seed(0), lambda: np.random.rand(3), lambda: random.getrandbits(80)],
    ids=["seed", "array", "long"],
)
@pytest.mark.parametrize("decide", [None, "example"])
def test_what_no_program_holds_is_refused(draw: Callable[[], object], decide: str | None) -> None:
    """A seed, an array, a number beyond 64 bits: refused with the example, too, which nobody is sent to."""
    model, before = Drawing(draw), generators()
    with pytest.raises(whence.SideEffect, match="a number of up to 64 bits") as caught:
        whence.capture(model, (X,), decide=decide)
    assert "let the example decide" not in (caught.value.remedy or "")
    assert differing(before, generators()) == []


class Masking(nn.Linear):
    """Draws a mask with NumPy, and goes by a value after that, as Wav2Vec2 does when it trains."""

    def forward(self, input: Tensor) -> Tensor:
        masked = torch.from_numpy(np.random.rand(*input.shape) < 0.5)
        hidden = super().forward(torch.where(masked, 0.0, input))
        return hidden if torch.rand(()) < 0.1 else hidden.tanh()


@pytest.mark.parametrize("decide", [None, "example"])
def test_a_decision_after_what_no_program_holds(decide: str | None) -> None:
    """The draw is refused: letting the example decide would end there."""
    with pytest.raises(whence.SideEffect, match="draws from NumPy's default generator") as caught:
        whence.capture(Masking(4, 4), (X,), decide=decide)
    assert "let the example decide" not in (caught.value.remedy or "")


def test_what_a_default_argument_draws_is_refused() -> None:
    """Nobody sees it drawn: where other threads run, it may as well have been one of them."""
    with pytest.raises(whence.SideEffect, match="no default argument draws it"):
        whence.capture(Drawing(drawn_by_default), (X,), decide="example")


CHECKING = """
def checked(things, *, draw=draw):
    thing = things[draw(32) % len(things)]
    if not isinstance(thing, Tensor):
        raise TypeError("not a tensor")
    return things[0] * things[1]
"""


def _checking() -> Callable[[list[Tensor]], Tensor]:
    """Code as beartype generates it: it draws which element of a list it looks at."""
    names: dict[str, Any] = {"draw": random.getrandbits, "Tensor": Tensor}
    exec(compile(CHECKING, "<@beartype(tests.checked) at 0x7f0000000000>", "exec"), names)
    checked: Callable[[list[Tensor]], Tensor] = names["checked"]
    return checked


class Checked(nn.Linear):
    """Whether it draws itself, too, says `draws`."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__(4, 4)
        self.draws, self.checked = draws, _checking()

    def forward(self, input: Tensor) -> Tensor:
        scale = 2 if self.draws and random.random() < 0.5 else 1
        return self.checked([super().forward(input), input * scale])


@pytest.mark.parametrize("backward", [False, True])
def test_what_checks_types_may_draw(backward: bool) -> None:
    """Nothing follows from which element it looks at; the functions are given back."""
    model, before = Checked(draws=False), generators()
    held = dict(model.checked.__kwdefaults__ or {})
    program = whence.capture(model, (X,), backward=backward)
    assert differing(before, generators()) == []
    assert model.checked.__kwdefaults__ == held
    assert program.verify(model, (X,)).ok
    assert program.check(model, (X,)) == []


@pytest.mark.parametrize("decide", [None, "example"])
def test_what_checks_types_beside_other_draws_is_refused(decide: Literal["example"] | None) -> None:
    """Eager mode draws for both in turn, which the program would not."""
    with pytest.raises(whence.SideEffect, match="draws from Python's random"):
        whence.capture(Checked(draws=True), (X,), decide=decide)


def test_in_files_and_elsewhere(tmp_path: Path) -> None:
    """A loaded program draws, too; an exported one would not, and is refused."""
    model, program = captured(of_python)
    program.save(tmp_path / "flip.whence")
    loaded = whence.load(tmp_path / "flip.whence", model=model)
    seeded(seed_of(of_python, True))
    expected = model(X)
    seeded(seed_of(of_python, True))
    assert torch.equal(loaded.module()(X), expected)
    assert not program.cost().gaps
    with pytest.raises(whence.NotExportable, match="none of torch's"):
        program.to_exported_program()


class Holding:
    """Has a clock, and asks one by a name of its file."""

    def __init__(self) -> None:
        self.clock = time.perf_counter

    def held(self) -> float:
        """What the clock shows that it holds."""
        return self.clock()

    def named(self) -> float:
        """What the clock shows that its file names, asked twice."""
        return perf_counter() + self.again()

    def again(self) -> float:
        """The same, in another function."""
        return perf_counter()


class Asking(nn.Module):
    """Computes with what it is told."""

    def __init__(self, ask: Callable[[], float]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.ask()


def closing_over(clock: Callable[[], float]) -> Callable[[], float]:
    return lambda: 2 * clock()


@pytest.mark.parametrize(
    "ask",
    [lambda: 2 * perf_counter(), closing_over(time.time), Holding().held, Holding().named],
    ids=["name", "closure", "attribute", "name in a method"],
)
def test_a_clock_by_any_name_is_refused(ask: Callable[[], float]) -> None:
    """In a model and in a step: what it shows is no constant. Names are as they were afterwards."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum() * ask()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(whence.SideEffect, match="the model calls time"):
        whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    with pytest.raises(whence.SideEffect, match="the model calls time"):
        whence.capture(Asking(ask), (X,))
    assert perf_counter is time.perf_counter and ask() > 0


@pytest.mark.parametrize("clock", [time.time, time.perf_counter, time.monotonic_ns])
def test_a_clock_is_looked_at_in_every_run(clock: Callable[[], float]) -> None:
    """What a step measures and keeps is of that run; what it asks of a clock is a decision."""
    model, times, begun = nn.Linear(4, 4), list[float](), clock()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        start = clock()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(clock() - start)
        if clock() - begun < 0:
            raise ValueError
        return loss

    with pytest.raises(whence.SideEffect, match='with decide="example" every run looks at a clock'):
        whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer, decide="example")
    bound = program.bind(model, optimizer)
    before, eager = clock(), deepcopy(model)(X).square().mean()
    assert torch.equal(bound(X), eager)
    bound(X)
    assert len(times) == 2 and all(0 < each < clock() - before for each in times)
