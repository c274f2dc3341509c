"""What a model changes of objects and containers that it holds, a bound step changes as eager does."""

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.tracing.steps.small import Step, zero_first


class Plain:
    """An object with attributes."""

    def __init__(self) -> None:
        self.count = 0
        self.last: Any = None


class Slotted:
    """One with slots."""

    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last: Any = None


@dataclass
class Record:
    """One whose class is made for it."""

    count: int = 0
    last: Any = None


class Computed:
    """One that is written through a property."""

    def __init__(self) -> None:
        self._count = 0
        self.last: Any = None

    @property
    def count(self) -> int:
        """How often it was counted."""
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        self._count = value


KINDS: dict[str, Callable[[], Any]] = {
    "plain": Plain,
    "slotted": Slotted,
    "record": Record,
    "computed": Computed,
    "namespace": lambda: SimpleNamespace(count=0, last=None),
}


class Counting(nn.Module):
    """Counts its calls in an object, computes with that, and keeps what it saw last."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        """Rows that grow with each call."""
        y = self.linear(x)
        self.held.count += 1
        self.held.last = y.detach().sum()
        return y * self.held.count


class Twice(nn.Module):
    """Two that count, with an object each, or in common; `within` holds the first in a list, too."""

    def __init__(self, kind: str, *, shared: bool) -> None:
        super().__init__()
        held = KINDS[kind]()
        self.first = Counting(held)
        self.second = Counting(held if shared else KINDS[kind]())
        self.within = [held]

    def forward(self, x: Tensor) -> Tensor:
        """Both, and what the first has kept."""
        y: Tensor = self.second(self.first(x))
        self.within[0].count += 1
        return y + self.first.held.last

    def seen(self) -> list[Any]:
        """All that it keeps, as numbers."""
        helds = (self.first.held, self.second.held)
        return [(held.count, held.last if held.last is None else held.last.item()) for held in helds]


def training(model: nn.Module) -> tuple[Step, torch.optim.Optimizer]:
    """A step of a model, and its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return zero_first(model, optimizer), optimizer


def batch(number: int = 1) -> Tensor:
    """Rows of one number."""
    return torch.full((2, 3), float(number))


@pytest.mark.parametrize("saved", [False, True], ids=["captured", "loaded"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_changed_as_in_eager(kind: str, shared: bool, saved: bool, tmp_path: Path) -> None:
    """Counts are advanced, also where somebody sets them; and so does a program that was loaded beside its
    model."""
    model = Twice(kind, shared=shared)
    twin = copy.deepcopy(model)
    step, optimizer = training(model)
    eager, _ = training(twin)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert model.seen() == twin.seen()
    if saved:
        program.save(tmp_path / "step")
        program = whence.load(tmp_path / "step", model=model)
    run = program.bind(model, optimizer)
    for number in range(4):
        if number == 2:
            model.first.held.count = twin.first.held.count = 7
        assert torch.equal(run(batch(number)), eager(batch(number)))
        assert model.seen() == twin.seen()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_another_model_are_not_changed(kind: str) -> None:
    """A step changes what the captured model holds: it is not bound to another one."""
    model = Twice(kind, shared=False)
    step, optimizer = training(model)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    other = copy.deepcopy(model)
    _, theirs = training(other)
    with pytest.raises(whence.UsageError, match="of the captured model, and this is another one"):
        program.bind(other, theirs)


class Keeping(nn.Module):
    """Has containers, into one of which a line of `BODIES` puts something."""

    def __init__(self, body: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.body = body
        self.rows: list[list[Any]] = [[], [1.0]]
        self.tree = {"a": {"n": 0}, "k": 3.0}
        self.losses: dict[str, list[Tensor]] = {"loss": []}
        self.made: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.stats: list[dict[str, Any]] = [{"n": 0}]
        self.counts = [0, 3.0]

    def forward(self, x: Tensor) -> Tensor:
        """Rows, scaled by what is in two containers."""
        y: Tensor = self.linear(x) * self.tree["k"] * self.counts[1]
        BODIES[self.body](self, y.detach().sum())
        return y

    def seen(self) -> str:
        """All that it keeps."""
        return str((self.rows, self.tree, self.losses, dict(self.made), self.stats, self.counts))


def _adds(held: Any, key: Any) -> None:
    held[key] += 1


BODIES: dict[str, Callable[[Any, Tensor], None]] = {
    "a number in a list": lambda model, _: _adds(model.counts, 0),
    "a number in a dictionary in one": lambda model, _: _adds(model.tree["a"], "n"),
    "a number in a dictionary in a list": lambda model, _: _adds(model.stats[0], "n"),
    "a tensor in a dictionary in a list": lambda model, total: model.stats[0].update(last=total),
    "a list in a list that grows": lambda model, _: model.rows[0].append(1.0),
    "a list in a dictionary that grows": lambda model, total: model.losses["loss"].append(total),
    "a list that grows where none was": lambda model, total: model.made["loss"].append(total),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("body", BODIES)
def test_containers_are_changed_as_in_eager(body: str) -> None:
    """At any depth; and nothing is said to be lost that every run puts there."""
    model = Keeping(body)
    twin = copy.deepcopy(model)
    step, optimizer = training(model)
    eager, _ = training(twin)
    run = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer).bind(model, optimizer)
    for number in range(3):
        assert torch.equal(run(batch(number)), eager(batch(number)))
        assert model.seen() == twin.seen()


CHANGES: dict[str, Callable[[Keeping], None]] = {
    "tree": lambda model: model.tree.update(k=4.0),
    "counts": lambda model: model.counts.__setitem__(1, 4.0),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("body", ["a number in a list", "a number in a dictionary in one"])
def test_all_else_in_such_containers_is_looked_at(body: str, name: str) -> None:
    """Only what a step puts there is its own: another entry was read, and decides of the program."""
    model = Keeping(body)
    step, optimizer = training(model)
    run = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer).bind(model, optimizer)
    run(batch())
    CHANGES[name](model)
    with pytest.raises(whence.StaleCapture, match=f"`{name}` was"):
        run(batch())
