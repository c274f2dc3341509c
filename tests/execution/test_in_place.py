"""Steps whose state is written where it lies: the same bits, the same tensors, and when it is not done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import whence
from tests.checks import differing, state
from tests.tracing.steps.small import batch, clipped, never_zero, zero_first, zero_last
from whence._torch.graphs import own_copy
from whence.execution.in_place import InPlace, Placing, in_place

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda held: AdamW(held, lr=0.01, foreach=True),
    "adamw one by one": lambda held: AdamW(held, lr=0.01, foreach=False),
    "adamw fused": lambda held: AdamW(held, lr=0.01, fused=True),
    "adam amsgrad": lambda held: Adam(held, lr=0.01, foreach=True, amsgrad=True),
    "adam maximize": lambda held: Adam(held, lr=0.01, foreach=True, maximize=True, weight_decay=0.1),
    "sgd": lambda held: SGD(held, lr=0.01, foreach=True),
    "sgd fused": lambda held: SGD(held, lr=0.01, momentum=0.9, fused=True),
    "nesterov": lambda held: SGD(held, lr=0.01, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.1),
    "rmsprop": lambda held: RMSprop(held, lr=0.01, momentum=0.5, centered=True, foreach=True),
    "adagrad": lambda held: Adagrad(held, lr=0.01, foreach=True),
    "nadam": lambda held: NAdam(held, lr=0.01, foreach=True),
}
STEPS = {"zero last": zero_last, "zero first": zero_first, "never zero": never_zero, "clipped": clipped}


def small(make: Make, dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, Optimizer]:
    """The same bits at every call; one weight in two places, and one that is a number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)).to(dtype)
    model[2].weight = model[0].weight
    return model, make(model.parameters())


def placed(program: whence.Program) -> InPlace | None:
    """What of a program is put in place."""
    return in_place(program, own_copy(program.graph_module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sample(12)
def test_steps_are_those_of_eager_mode(name: str, step: str, dtype: torch.dtype) -> None:
    """Four of them, bit for bit, in the same tensors, and torch counts that these were written."""
    if (name, dtype) == ("sgd fused", torch.bfloat16):
        pytest.skip("what the fused kernel rounds depends on addresses: eager mode differs from itself")
    (model, optimizer), (eager, theirs) = (small(OPTIMIZERS[name], dtype) for _ in range(2))
    x = batch().to(dtype)
    program = whence.capture_step(STEPS[step](model, optimizer), (x,), model=model, optimizer=optimizer)
    run, reference = program.bind(model, optimizer), STEPS[step](eager, theirs)
    before = [(row, row.data_ptr(), row._version) for row in model.parameters()]
    for _ in range(4):
        run(x)
        reference(x)
        if step == "never zero":
            optimizer.zero_grad()
            theirs.zero_grad()
    assert differing(state(eager), state(model)) == []
    assert all(
        differing(*pair) == [] for pair in zip(theirs.state.values(), optimizer.state.values(), strict=True)
    )
    assert all(row.data_ptr() == at and row._version > count for row, at, count in before)
    assert (there := placed(program)) is not None
    assert {f"p_{row.replace('.', '_')}" for row, _ in model.named_parameters()} <= there.written


def test_the_program_stays_functional() -> None:
    """What is put in place is a copy of its graph."""
    model, optimizer = small(OPTIMIZERS["adamw"])
    program = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    text = str(program.graph)
    program.bind(model, optimizer)(batch())
    assert str(program.graph) == text
    assert "foreach_add_." not in text


class Keeping(nn.Module):
    """Gives its weight as it was before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def test_what_somebody_reads_afterwards_is_not_overwritten() -> None:
    """An old value that the step returns, by a view or as it is."""
    model = Keeping()
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        before = model.weight.detach().clone()
        (model.weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return before, model.weight.detach() - before

    program = whence.capture_step(step, (torch.ones(4),), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    for count in range(3):
        before, moved = run(torch.ones(4))
        assert torch.equal(before, torch.ones(4) - 0.5 * count)
        assert torch.equal(moved, torch.full((4,), -0.5))


def test_parameters_that_share_memory_are_computed_beside() -> None:
    """Two that overlap since the capture: what one writes the other must not see. And copies are no state."""
    model, optimizer = small(OPTIMIZERS["sgd"])
    program = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    placing = Placing(program, program.graph_module)
    named = {name: row.data for name, row in model.named_parameters()}
    values = {row.name: named.get(row.path, row.value) for row in program.signature.inputs}
    values |= {"x": batch()} | {
        row.name: 0.1 for row in program.signature.inputs if row.name.startswith("o_")
    }
    given = list(values.values())
    assert placing.graph(values, given) is not None
    assert placing.graph(values, [one.clone() if isinstance(one, Tensor) else one for one in given]) is None
    flat = torch.zeros(6)
    overlapping = values | {"p_0_bias": flat[0:4], "p_2_bias": flat[2:6]}
    assert placing.graph(overlapping, list(overlapping.values())) is None
    beside = values | {"p_0_bias": torch.zeros(8)[0:4], "p_2_bias": torch.zeros(8)[4:8]}
    assert placing.graph(beside, list(beside.values())) is not None


def test_a_step_that_may_still_go_another_way_writes_nothing_before() -> None:
    """What decides comes after the optimizer: its state is computed beside."""
    model, optimizer = small(OPTIMIZERS["adamw"])

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        if bool(loss > -1000):
            loss = loss * 2
        optimizer.zero_grad()
        return loss

    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer, decide="example")
    assert placed(program) is None
    program.bind(model, optimizer)(batch())
    assert not optimizer.state[next(model.parameters())]["exp_avg"].eq(0).all()


def test_without_an_optimizer_nothing_is_put_in_place() -> None:
    """Buffers that a forward writes are copied, as before."""
    model = nn.BatchNorm1d(4)
    program = whence.capture(model, (batch(),))
    program.bind(model)(batch())
    assert program.step is None
