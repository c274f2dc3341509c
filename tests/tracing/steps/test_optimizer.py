"""What an optimizer holds: tensors and numbers of its state, wherever in it, and of its own; constants."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import whence
from tests.tracing.steps.small import batch, small, zero_first


class Counter:
    """Counts by itself."""

    taken = 0

    def __repr__(self) -> str:
        return f"Counter({vars(self)})"

    def next(self) -> int:
        self.taken += 1
        return self.taken


class Own(Optimizer):
    """Descends by a number that it makes of what it holds."""

    def __init__(self, model: nn.Module, number: Callable[[Any], Any]) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.number, self.scale = number, 1.0
        self.taken: Any = 0
        self.held, self.counter = {"taken": 0}, Counter()
        self.state["taken"] = 0  # type: ignore[index]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        number = self.number(self)
        for held in self.param_groups[0]["params"]:
            held.sub_(held.grad * number, alpha=0.1)


def counts(optimizer: Any) -> Any:
    optimizer.taken += 1
    return optimizer.taken


def counts_in_a_dict(optimizer: Any) -> Any:
    optimizer.held["taken"] += 1
    return optimizer.held["taken"]


def counts_in_state(optimizer: Any) -> Any:
    optimizer.state["taken"] += 1
    return optimizer.state["taken"]


def counts_in_an_object(optimizer: Any) -> Any:
    return optimizer.counter.next()


def counts_in_a_tensor(optimizer: Any) -> Any:
    optimizer.taken = torch.as_tensor(optimizer.taken) + 1
    return optimizer.taken


@pytest.mark.parametrize(
    ("number", "path"),
    [
        (counts_in_a_dict, "optimizer.held['taken']"),
        (counts_in_state, "optimizer.state['taken']"),
        (counts_in_an_object, "optimizer.counter.taken"),
        (counts_in_a_tensor, "optimizer.taken"),
    ],
)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "second"])
def test_what_an_optimizer_counts_is_state(number: Callable[[Any], Any], path: str, warm: bool) -> None:
    """In a container, in an object, or in a tensor that takes the place of a number."""
    (model, _), (theirs, _) = small(), small()
    optimizer, other = Own(model, number), Own(theirs, number)
    step, eager = zero_first(model, optimizer), zero_first(theirs, other)
    if warm:
        step(batch())
        eager(batch())
    before = str(vars(optimizer))
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert str(vars(optimizer)) == before
    assert program.input(path).kind is whence.InputKind.OPTIMIZER_STATE
    run = program.bind(model, optimizer)
    for _ in range(3):
        assert torch.equal(run(batch()), eager(batch()))
        assert str(vars(optimizer)) == str(vars(other))


def test_what_an_optimizer_holds_is_compared() -> None:
    """A plain value is a constant of the program, in every run."""
    model, _ = small()
    optimizer = Own(model, lambda held: held.scale)
    step = zero_first(model, optimizer)
    run = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer).bind(model, optimizer)
    run(batch())
    optimizer.scale = 2.0
    with pytest.raises(whence.StaleCapture, match=r"`optimizer\.scale` was 1\.0 at capture, is 2\.0 now"):
        run(batch())


@pytest.mark.parametrize("warm", [False, True], ids=["first", "second"])
def test_a_count_of_its_own_is_state(warm: bool) -> None:
    """An attribute that is a number is advanced as eager advances it."""
    (model, _), (theirs, _) = small(), small()
    optimizer, other = Own(model, counts), Own(theirs, counts)
    step, eager = zero_first(model, optimizer), zero_first(theirs, other)
    if warm:
        step(batch())
        eager(batch())
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert program.input("optimizer.taken").name == "o_taken"
    assert program.verify(model, (batch(),)).ok
    run = program.bind(model, optimizer)
    for _ in range(3):
        assert torch.equal(run(batch()), eager(batch()))
        assert optimizer.taken == other.taken
        assert type(optimizer.taken) is int


class Returning(Optimizer):
    """Moves parameters away and back, as sharpness-aware optimizers do; one `looks` at where they were."""

    def __init__(self, model: nn.Module, *, looks: bool) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.looks = looks

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for held in self.param_groups[0]["params"]:
            state = self.state[held]
            moved = held.grad * state["before"].sum() if self.looks and state else held.grad
            state["before"] = held.data.clone()
            held.add_(moved)
            held.data = state["before"]
            held.sub_(held.grad, alpha=0.1)


@pytest.mark.parametrize("looks", [False, True])
def test_parameters_that_are_put_back(looks: bool) -> None:
    """The memory is the state's, too, from then on: refused where the next step looks into it."""
    (model, _), (theirs, _) = small(), small()
    optimizer, other = Returning(model, looks=looks), Returning(theirs, looks=looks)
    step, eager = zero_first(model, optimizer), zero_first(theirs, other)
    step(batch())
    eager(batch())
    if looks:
        with pytest.raises(whence.UnsupportedMutation, match="the next step reads it"):
            whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
        return
    run = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer).bind(model, optimizer)
    for _ in range(3):
        assert torch.equal(run(batch()), eager(batch()))
        assert all(map(torch.equal, model.parameters(), theirs.parameters()))


def two(counted: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """A step of two models, one of which is trained by an optimizer of its own kind."""
    (first, adam), (second, _) = small(), small()
    optimizers = [adam, Own(second, counted)]
    steps = [zero_first(first, adam), zero_first(second, optimizers[1])]
    return lambda x: [step(x) for step in steps], {"model": (first, second), "optimizer": optimizers}


def test_several_optimizers_are_bound_in_order() -> None:
    """Those of other classes, and in another order, are others."""
    step, held = two(lambda _: 1.0)
    program = whence.capture_step(step, (batch(),), **held)
    assert program.verify(held["model"], (batch(),), optimizer=held["optimizer"]).ok
    program.bind(**held)(batch())
    with pytest.raises(whence.UsageError, match="do not hold the parameters"):
        program.bind(held["model"], held["optimizer"][::-1])
    other = type("Other", (Own,), {})(held["model"][1], lambda _: 1.0)
    with pytest.raises(whence.StaleCapture, match=r"optimizer\[1\]\.__class__"):
        program.bind(held["model"], [held["optimizer"][0], other])(batch())
    with pytest.raises(whence.UsageError, match="captured with Optimizers"):
        program.bind(held["model"], held["optimizer"][0])


def test_of_several_optimizers_no_attribute_is_advanced() -> None:
    """One that counts by itself is captured alone."""
    step, held = two(counts)
    with pytest.raises(whence.UnsupportedStep, match=r"changes optimizer\.taken"):
        whence.capture_step(step, (batch(),), **held)
    assert held["optimizer"][1].taken == 0
