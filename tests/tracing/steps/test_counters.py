"""Numbers that an optimizer advances in Python are state of the program."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import whence
from tests.checks import differing, state
from tests.tracing.steps.small import batch, small, zero_first
from whence.errors import StaleCapture


class Advancing(Optimizer):
    """Advances whatever `advance` does, in a group and in the state, and steps by what that gives."""

    def __init__(self, parameters: Any, advance: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
        super().__init__(parameters, {"lr": 0.1, "beta": 0.9})
        self.advance = advance

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                held = self.state[parameter]
                parameter.sub_(parameter.grad * self.advance(group, held))


def counts(_: dict[str, Any], held: dict[str, Any]) -> Any:
    held["taken"] = held.get("taken", 0) + 1
    return 0.1 / held["taken"]


def counts_in_the_group(group: dict[str, Any], _: dict[str, Any]) -> Any:
    return group["lr"] * math.sqrt(1 - group["beta"] ** group["step"])


def multiplies(group: dict[str, Any], held: dict[str, Any]) -> Any:
    held["product"] = held.get("product", 1.0) * group["beta"]
    return 1 - held["product"]


def sums_rates(group: dict[str, Any], held: dict[str, Any]) -> Any:
    held["sum"] = held.get("sum", 0.0) + group["lr"] ** 2
    return group["lr"] / (1 + held["sum"])


def doubles(_: dict[str, Any], held: dict[str, Any]) -> Any:
    held["scale"] = 2 * held.get("scale", 0) + 5
    return 1 / held["scale"]


def makes_a_tensor(group: dict[str, Any], held: dict[str, Any]) -> Any:
    held["taken"] = held.get("taken", 0) + 1
    return torch.tensor([group["beta"] ** held["taken"], 1.0]).sum() + torch.tensor(held["taken"])


def adds_whole_numbers(_: dict[str, Any], held: dict[str, Any]) -> Any:
    held["taken"] = held.get("taken", 0) + 1
    return 1 / (torch.tensor([3]) + held["taken"])


def looks_at_tensors(group: dict[str, Any], held: dict[str, Any]) -> Any:
    held.setdefault("average", torch.zeros(()))
    held["average"].add_(1)
    group["scale"] = math.sqrt(held["average"])
    return group["scale"]


def keeps(_: dict[str, Any], held: dict[str, Any]) -> Any:
    held.setdefault("rate", 0.25)
    return held["rate"]


def leaves_a_place_empty(_: dict[str, Any], held: dict[str, Any]) -> Any:
    held.setdefault("compensation", None)
    return 0.25


def scales_by_a_list(group: dict[str, Any], held: dict[str, Any]) -> Any:
    held["taken"] = held.get("taken", 0) + 1
    return torch.tensor([-group["lr"] * group["beta"] ** held["taken"], 1.0])[0]


ADVANCE = (
    *(counts, counts_in_the_group, multiplies, sums_rates, doubles, adds_whole_numbers, keeps),
    *(leaves_a_place_empty, scales_by_a_list),
)
CASES = [(advance, taken) for advance in ADVANCE for taken in (0, 1, 3)]
CASES += [(makes_a_tensor, 1), (looks_at_tensors, 1)]  # whose first step has a constant there


def stepper(advance: Any, taken: int) -> tuple[Callable[[Tensor], Any], Any, Advancing]:
    model, _ = small()
    optimizer = Advancing(model.parameters(), advance)
    step = zero_first(model, optimizer)
    for _ in range(taken):
        step(batch())
    return step, model, optimizer


def held_by(optimizer: Optimizer) -> Any:
    """The numbers in state and groups, with their types."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return repr((groups, [held for held in optimizer.state.values() if held]))


@pytest.mark.sample(6)
@pytest.mark.parametrize(("advance", "taken"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_steps_are_eager(advance: Any, taken: int) -> None:
    """From the first step on, or after some, parameters and numbers are eager's, also with another rate."""
    (step, model, optimizer), (eager, theirs, other) = (stepper(advance, taken) for _ in range(2))
    before = held_by(optimizer)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert held_by(optimizer) == before
    assert program.verify(model, (batch(),)).ok
    assert held_by(optimizer) == before
    run = program.bind(model, optimizer)
    for number in range(4):
        assert torch.equal(run(batch()), eager(batch()))
        assert differing(state(model), state(theirs)) == []
        assert held_by(optimizer) == held_by(other)
        for one in (optimizer, other):
            one.param_groups[0]["lr"] *= 0.5 if number == 1 else 1


def test_numbers_are_in_the_signature() -> None:
    """An input and an output for each, called as a person reads it."""
    step, model, optimizer = stepper(counts, 2)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    row = program.input("optimizer.state['0.weight']['taken']")
    assert (row.kind, row.value, row.of) == ("optimizer_state", 2, "0.weight")
    assert program.output("new_o_0_weight_taken").of == row.name
    assert program.input("optimizer.param_groups[0]['step']").value == 2
    assert program.output("new_o_param_groups_0_step").kind == "mutation"
    assert program.step is not None
    assert "optimizer.param_groups[0]['beta']" in [row.path for row in program.step.settings]


def warms_up(group: dict[str, Any], _: dict[str, Any]) -> Any:
    return 0.1 * group["step"] if group["step"] < 4 else 0.1


def test_a_branch_by_a_number_is_looked_at_in_every_run() -> None:
    """The program holds as long as it goes the same way; else it says so, and changes nothing."""
    (step, model, optimizer), (eager, theirs, _) = (stepper(warms_up, 1) for _ in range(2))
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer, on_violation="raise")
    for _ in range(2):
        assert torch.equal(run(batch()), eager(batch()))
    before = held_by(optimizer)
    with pytest.raises(StaleCapture, match=r"param_groups\[0\]\['step'\].* is False, and was True") as caught:
        run(batch())
    assert "test_counters.py" in caught.value.what
    assert differing(state(model), state(theirs)) == []
    assert held_by(optimizer) == before
    run = program.bind(model, optimizer)  # which captures the other way, and keeps it
    for _ in range(2):
        assert torch.equal(run(batch()), eager(batch()))


def sets(_: dict[str, Any], held: dict[str, Any]) -> Any:
    held["last"] = 2.0 if "last" in held else 1.0
    return held["last"]


def begins_otherwise(group: dict[str, Any], held: dict[str, Any]) -> Any:
    held["product"] = 3.0 if "product" not in held else held["product"] * group["beta"] + 1
    return held["product"]


def test_a_number_that_later_steps_set_otherwise_than_the_first() -> None:
    """The program is of the second step, and the first one is taken by the step itself."""
    step, model, optimizer = stepper(sets, 0)
    eager, theirs, other = stepper(sets, 0)
    before = held_by(optimizer)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert held_by(optimizer) == before
    run = program.bind(model, optimizer)
    for _ in range(3):
        assert torch.equal(run(batch()), eager(batch()))
        assert differing(state(model), state(theirs)) == []
        assert [held["last"] for held in optimizer.state.values()] == [
            held["last"] for held in other.state.values()
        ]


def test_tensors_in_groups_are_state() -> None:
    """A tensor that a step puts into a group is an input and an output."""

    def averages(group: dict[str, Any], _: dict[str, Any]) -> Any:
        group["average"] = group.get("average", torch.zeros(())) * 0.5 + 1
        return group["average"]

    (step, model, optimizer), (eager, theirs, other) = (stepper(averages, 1) for _ in range(2))
    run = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer).bind(model, optimizer)
    for _ in range(3):
        assert torch.equal(run(batch()), eager(batch()))
    assert differing(state(model), state(theirs)) == []
    assert held_by(optimizer) == held_by(other)
