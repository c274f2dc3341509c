"""What a step changes of its model in Python is changed by its program, as that of a trainer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import whence
from tests.checks import differing, state
from tests.tracing.steps.small import batch, zero_first


class Keeping(nn.Module):
    """A module that trains itself, and keeps things as attributes."""

    mean: Tensor

    def __init__(self, keep: Callable[[Keeping, Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.inner = nn.Linear(4, 2)
        self.inner.calls = 0  # type: ignore[assignment]
        self.taken, self.losses, self.last, self.logged = 0, [0.5], None, {"scale": 2.0}
        self.keep = keep
        self.optimizer = SGD(self.inner.parameters(), lr=0.1)

    def training_step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.inner(x).sin().square().mean() * self.logged["scale"]
        loss.backward()
        self.optimizer.step()
        self.keep(self, loss)
        return loss

    def kept(self) -> str:
        return str([self.taken, self.losses, self.last, self.logged, self.inner.calls])


def counts(model: Any, _: Tensor) -> None:
    model.taken += 1
    model.inner.calls += 2


def appends(model: Any, loss: Tensor) -> None:
    model.losses.append(loss.item())


def remembers(model: Any, loss: Tensor) -> None:
    model.last = loss.item()


def keeps_a_tensor(model: Any, loss: Tensor) -> None:
    model.last = loss.detach() * 2


def logs(model: Any, loss: Tensor) -> None:
    model.logged["loss"] = loss.item()


def divides_by_its_count(model: Any, _: Tensor) -> None:
    model.taken += 1
    for held in model.parameters():
        held.data.div_(model.taken)


def puts_a_buffer(model: Any, loss: Tensor) -> None:
    model.mean = model.mean * 0.9 + loss.detach()


def every_other(model: Any, loss: Tensor) -> None:
    model.taken += 1
    if model.taken % 2:
        model.losses.append(loss.item())


def goes_round(model: Any, loss: Tensor) -> None:
    places = torch.arange(model.taken, model.taken + 4) % 8
    model.taken = (model.taken + 4) % 8
    model.last = loss.detach() * places.numel() + places[0] + places[-1]


def counts_up_to(model: Any, loss: Tensor) -> None:
    model.taken += 1
    model.last = loss.detach() * torch.arange(model.taken).numel() + torch.arange(0, model.taken, 0.5).sum()


KEEPING = [
    *(counts, appends, remembers, keeps_a_tensor, logs, divides_by_its_count, every_other),
    *(puts_a_buffer, goes_round, counts_up_to),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ["method", "function"])
@pytest.mark.parametrize("keep", KEEPING, ids=lambda keep: keep.__name__)
def test_attributes_are_eager(keep: Any, way: str) -> None:
    """Counters, lists, the last loss: in the first step and in all others."""
    torch.manual_seed(0)
    ours = Keeping(keep)
    theirs = Keeping(keep)
    theirs.load_state_dict(ours.state_dict())

    def function(x: Tensor) -> Tensor:
        return ours.training_step(x)

    step = ours.training_step if way == "method" else function
    before = ours.kept()
    program = whence.capture_step(step, (batch(),), model=ours, optimizer=ours.optimizer)
    assert program.verify(ours, (batch(),)).ok
    assert ours.kept() == before
    run = program.bind(ours, ours.optimizer)
    for scale in (1.0, 0.5, 2.0):
        assert torch.equal(run(batch() * scale), theirs.training_step(batch() * scale))
        assert ours.kept() == theirs.kept()
        assert differing(state(ours), state(theirs)) == []


class Watched:
    """A trainer that a hook of its model leads to; what its loss counts is a number that steps advance."""

    def __init__(self, watch: Callable[[Watched], Callable[..., Any]]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        self.first, self.taken, self.last, self.memory = WEIGHTS.loss, 0, batch(), torch.zeros(2)
        self.log: list[Tensor] = []
        self.seen: dict[str, Tensor] = {"model": batch()}
        self.model.register_forward_hook(watch(self))

    def hook(self, _module: nn.Module, _given: Any, made: Tensor) -> None:
        self.last = made.detach()

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).sin().square().mean() * WEIGHTS.loss
        loss.backward()
        self.optimizer.step()
        self.taken += 1
        self.memory = 0.9 * self.memory + self.model.bias.detach()
        WEIGHTS.loss *= 0.9
        return loss.detach()


@dataclass
class Weights:
    """What losses count."""

    loss: float = 1.0


WEIGHTS = Weights()
WATCHES: dict[str, Callable[[Watched], Callable[..., Any]]] = {
    "an entry": lambda it: lambda module, given, made: it.seen.__setitem__("model", made.detach()),
    "an attribute": lambda it: lambda module, given, made: setattr(it, "last", made.detach()),
    "a list": lambda it: lambda module, given, made: it.log.append(made.detach()),
    "a method": lambda it: it.hook,
    "reads": lambda it: lambda module, given, made: made * 2 if it.seen else None,
}


@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)
def test_a_trainer_that_a_hook_leads_to(watch: Callable[[Watched], Callable[..., Any]]) -> None:
    """What it keeps is its own, as it is of one that no hook knows."""
    found = []
    for is_captured in (False, True):
        WEIGHTS.loss = 1.0
        trainer = Watched(watch)
        run: Any = trainer.step
        if is_captured:
            held: dict[str, Any] = {"model": trainer.model, "optimizer": trainer.optimizer}
            run = whence.capture_step(trainer.step, (batch(),), **held).bind(**held)
        losses = [run(batch() * scale) for scale in (1.0, 0.5, 2.0)]
        tensors = [*losses, *trainer.model.parameters(), trainer.last, trainer.memory, trainer.seen["model"]]
        tensors += trainer.log
        found.append(([each.tolist() for each in tensors], trainer.taken, WEIGHTS.loss))
    assert found[0] == found[1]


class Namespace:
    """An object with whatever attributes it is given."""


class Noting(nn.Module):
    """Leaves an object of a class that no program makes on one that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 2), Namespace()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.event = Namespace()  # type: ignore[attr-defined]
        result: Tensor = self.linear(x)
        return result


def test_what_stays_as_it_was_is_said() -> None:
    """What no program makes again is left out where the model puts it on an object."""
    model = Noting()
    optimizer = SGD(model.parameters(), lr=0.1)
    step = zero_first(model, optimizer)
    held: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with pytest.warns(UserWarning, match=r"leaves a Namespace in kept\.event, which a program"):
        program = whence.capture_step(step, (batch(),), **held)
    program.bind(**held)(batch())
    assert not vars(model.kept)


def test_what_lies_beside_is_compared() -> None:
    """Entries of a dictionary into which the step puts others are constants."""
    model = Keeping(logs)
    held: dict[str, Any] = {"model": model, "optimizer": model.optimizer}
    run = whence.capture_step(model.training_step, (batch(),), **held).bind(**held)
    run(batch())
    model.logged["scale"] = 3.0
    with pytest.raises(whence.StaleCapture, match=r"item \['scale'\] is 3.0 now"):
        run(batch())
