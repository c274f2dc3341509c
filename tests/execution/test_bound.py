"""A program bound to live state: it runs where what it relies on holds, and says so in words where not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

import whence
from tests.behaviours.constructed_optimizers import Filtering, classes_and_sets_that_are_there
from tests.checks import differing, gradients, state
from tests.models import mean_sine
from tests.tracing.steps.small import batch, clipped, never_zero, plain_sgd, small, zero_first, zero_last
from whence.errors import CallError, StaleCapture, UnsupportedMutation, UsageError
from whence.program.arguments.optimizer_arguments import Outside


def captured(make: Callable[..., Any] = zero_first) -> tuple[whence.Program, nn.Sequential, AdamW]:
    model, optimizer = small()
    program = whence.capture_step(make(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    return program, model, optimizer


def test_schedule_runs_outside() -> None:
    """A learning rate is an input: a schedule changes it between steps, and does not warn."""
    (program, model, optimizer), (eager, theirs) = captured(), small()
    run, step = program.bind(model, optimizer), zero_first(eager, theirs)
    schedules = [ExponentialLR(optimizer, 0.5), ExponentialLR(theirs, 0.5)]
    for _ in range(3):
        assert torch.equal(run(batch()), step(batch()))
        for schedule in schedules:
            schedule.step()
    assert differing(state(eager), state(model)) == []
    assert optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 0.00125


def test_tensor_learning_rate_is_an_input() -> None:
    """So is one that is a tensor, on whichever side it changes."""
    (model, _), (eager, _) = small(), small()
    optimizer, theirs = (Adam(one.parameters(), lr=torch.tensor(0.1)) for one in (model, eager))
    program = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    run, step = program.bind(model, optimizer), zero_first(eager, theirs)
    for rate in (0.1, 0.05):
        for one in (optimizer, theirs):
            one.param_groups[0]["lr"].fill_(rate)
        run(batch())
        step(batch())
        assert differing(state(eager), state(model)) == []
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(StaleCapture, match="was a tensor at capture, is a number now"):
        run(batch())


def test_what_older_files_do_not_say_is_refused() -> None:
    """They named what a step read around itself, and had nothing to compare it with."""
    program, model, optimizer = captured()
    outside = (Outside("scale", {}, (), 1.0),)
    older = program.with_changes(step=replace(program.step, outside=outside))  # type: ignore[type-var]
    with pytest.raises(UsageError, match="the file does not say what scale was at capture"):
        older.bind(model, optimizer)


def test_settings_are_guarded() -> None:
    """Any other value of a group is a constant: another one is refused, and nothing is changed."""
    program, model, optimizer = captured()
    run = program.bind(model, optimizer)
    optimizer.param_groups[0]["betas"] = (0.8, 0.999)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    before = state(model)
    with pytest.raises(StaleCapture) as caught:
        run(batch())
    assert "`optimizer.param_groups[0]['betas']` was (0.9, 0.999) at capture, is (0.8, 0.999) now" in str(
        caught.value
    )
    assert "weight_decay" in str(caught.value)
    assert "is an input where the step sets it" in str(caught.value)
    assert differing(before, state(model)) == []
    assert optimizer.state == {}


def test_learning_rate_that_decides_is_guarded() -> None:
    """Where code of the optimizer's decides by the number, it is a constant."""

    class Deciding(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if self.param_groups[0]["lr"] > 0:
                super().step(closure)

    model, _ = small()
    optimizer = Deciding(model.parameters(), lr=0.01)
    program = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    assert program.step is not None
    assert "lr" in [row.key for row in program.step.settings]
    assert program.step.numbers == ()
    run = program.bind(model, optimizer)
    run(batch())
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(StaleCapture, match=r"was 0.01 at capture, is 0.05 now"):
        run(batch())


def test_model_is_guarded() -> None:
    """What `check` finds keeps the program from running."""
    program, model, optimizer = captured()
    assert program.check(model, (batch(),)) == []
    run = program.bind(model, optimizer)
    model.eval()
    assert program.check(model, (batch(),))
    with pytest.raises(StaleCapture, match="training"):
        run(batch())
    model.train()
    run(batch())
    with pytest.raises(CallError, match="do not fit"):
        run(batch(5))
    next(model.parameters()).register_hook(lambda gradient: gradient)
    with pytest.raises(StaleCapture, match="hook"):
        run(batch())


def test_gradients_of_before_are_refused() -> None:
    """A step that does not zero gradients first holds where there are none."""
    program, model, optimizer = captured(never_zero)
    run = program.bind(model, optimizer, on_violation="raise")
    run(batch())
    assert model[0].weight.grad is not None
    with pytest.raises(StaleCapture, match=r"0\.bias, 0\.weight, 2\.bias, 2\.weight have gradients"):
        run(batch())
    optimizer.zero_grad()
    run(batch())
    program, model, optimizer = captured(zero_last)
    program.bind(model, optimizer)(batch())
    assert all(held.grad is None for held in model.parameters())


def test_argument_gets_its_gradient() -> None:
    """An argument that requires a gradient gets it as in eager; one that has some is refused."""
    program, model, optimizer = captured()
    x = batch().requires_grad_()
    program = whence.capture_step(zero_first(model, optimizer), (x,), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    (eager, theirs), given, expected = small(), batch().requires_grad_(), batch().requires_grad_()
    run(given)
    zero_first(eager, theirs)(expected)
    assert torch.equal(given.grad, expected.grad)  # type: ignore[arg-type]
    with pytest.raises(StaleCapture, match="have gradients"):
        run(given)


def test_hooks_on_the_optimizer_are_refused() -> None:
    """The program does not run them."""
    program, model, optimizer = captured()
    run = program.bind(model, optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(StaleCapture, match="hooks on the optimizer's step"):
        run(batch())
    handle.remove()
    run(batch())


def test_other_instances_may_be_bound() -> None:
    """A copy of the model with an optimizer like the captured one trains as eager trains it."""
    program, model, _ = captured(clipped)
    copies = [copy.deepcopy(model) for _ in range(2)]
    optimizers = [AdamW(one.parameters(), lr=0.01) for one in copies]
    run, step = program.bind(copies[0], optimizers[0]), clipped(copies[1], optimizers[1])
    before = state(model)
    for _ in range(2):
        assert differing(dict(enumerate(run(batch()))), dict(enumerate(step(batch())))) == []  # type: ignore[arg-type]
    assert differing(*map(state, copies)) == []
    assert differing(*map(gradients, copies)) == []
    assert differing(before, state(model)) == []


def assigned(model: nn.Sequential, _optimizer: Optimizer) -> None:
    model.load_state_dict({name: held.clone() for name, held in model.state_dict().items()}, assign=True)


def replaced(model: nn.Sequential, _optimizer: Optimizer) -> None:
    held: Any = model[0]
    held.weight = nn.Parameter(held.weight.detach().clone())


def taken_out(_model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def put_in_another_order(_model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


def in_another_group(_model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})


def without_groups(_model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups.clear()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (assigned, "the optimizer does not hold 0.weight, 0.bias, 2.weight, 2.bias"),
        (replaced, "the optimizer does not hold 0.weight"),
        (taken_out, "the optimizer does not hold 2.bias"),
        (put_in_another_order, "the optimizer's groups have changed"),
        (in_another_group, "the optimizer's groups have changed"),
        (without_groups, "the optimizer does not hold 0.weight, 0.bias, 2.weight, 2.bias"),
    ],
)
def test_optimizer_holds_what_the_model_has(change: Callable[..., None], said: str) -> None:
    """In every call, not only when it is bound: what it does not hold is not trained."""
    program, model, optimizer = captured()
    run = program.bind(model, optimizer)
    run(batch())
    change(model, optimizer)
    before = state(model)
    with pytest.raises(StaleCapture) as caught:
        run(batch())
    assert caught.value.what == said
    assert differing(before, state(model)) == []
    anew = AdamW(model.parameters(), lr=0.01)
    program.bind(model, anew)(batch())


def test_missing_state_is_made_or_refused() -> None:
    """What a first step makes is made where it is known; a program of a later step asks for one step."""
    program, model, optimizer = captured()
    program.bind(model, optimizer)(batch())
    assert [*optimizer.state[next(model.parameters())]] == ["step", "exp_avg", "exp_avg_sq"]
    later = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    fresh = AdamW(model.parameters(), lr=0.01)
    with pytest.raises(StaleCapture, match="take one step with this optimizer"):
        later.bind(model, fresh)(batch())
    assert dict(fresh.state) == {}


UNFIT: dict[str, tuple[Callable[[nn.Sequential], Optimizer | None], str]] = {
    "none": (lambda model: None, "needs an optimizer"),
    "another class": (plain_sgd, "captured with AdamW, not SGD"),
    "other groups": (lambda model: AdamW([next(model.parameters())]), "groups do not hold"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_other_optimizers_are_refused(name: str) -> None:
    """An optimizer must be made as the captured one was."""
    (program, model, _), (make, words) = captured(), UNFIT[name]
    with pytest.raises(UsageError, match=words):
        program.bind(model, make(model))


def test_verify_wants_what_the_step_runs() -> None:
    """The step closes over its model and optimizer, so others cannot be compared."""
    program, model, optimizer = captured()
    assert program.verify(model, (batch(),), optimizer=optimizer).ok
    with pytest.raises(UsageError, match="other tensors"):
        program.verify(copy.deepcopy(model), (batch(),))
    with pytest.raises(UsageError, match="another one"):
        program.verify(model, (batch(),), optimizer=AdamW(model.parameters()))


def test_verify_finds_differences() -> None:
    """A program that computes something else is not said to be equal, and where it differs is named."""
    program, model, _ = captured()
    node = program.select(":: aten.addcdiv.default :: optimizer")[0]
    node.kwargs = {**node.kwargs, "value": -1.0}
    program.graph_module.recompile()
    result = program.verify(model, (batch(),))
    assert not result.ok
    assert "state 0.weight differs" in str(result)


def test_forward_runs_on_live_state() -> None:
    """A captured forward changes buffers in place, and returns what the model does."""
    ours, theirs = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    run = whence.capture(ours, (batch(),)).bind(ours)
    for _ in range(2):
        found = run(batch())
        assert torch.equal(found, theirs(batch()))
    assert not found.requires_grad
    assert differing(state(theirs), state(ours)) == []


class Corrected(nn.Module):
    """Takes a step of its own inside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(self.linear(x).sin().mean(), self.linear.weight)
        return x @ (self.linear.weight - gradient)


def test_hooks_on_gradients_are_nothing_to_a_forward() -> None:
    """They are there from the beginning, as norse's are, or come later; what differentiates calls them."""
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient * 2)
    run = whence.capture(model, (batch(),)).bind(model)
    model.bias.register_hook(lambda gradient: gradient * 2)
    assert torch.equal(run(batch()), model(batch()))
    corrected = Corrected()
    run = whence.capture(corrected, (batch(),)).bind(corrected)
    assert torch.equal(run(batch()), corrected(batch()))
    corrected.linear.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(StaleCapture, match="gradient hooks of linear"):
        run(batch())


def test_exported_program_runs_on_live_state() -> None:
    """A program without guards is checked against its inputs alone; arguments may be constants."""
    model = small()[0]
    run = whence.from_exported_program(torch.export.export(model, (batch(),))).bind(model)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert torch.equal(run(batch()), model(batch()))
    with pytest.raises(CallError):
        run(batch(5))


def test_joint_program_adds_gradients() -> None:
    """A joint program with a loss returns both, and adds gradients as `loss.backward()` does."""
    ours, theirs = (small()[0] for _ in range(2))
    program = whence.capture(ours, (batch(),), backward=lambda found: found.sin().mean(), state="attributes")
    run = program.bind(ours)
    for _ in range(2):
        loss, found = run(batch())
        expected = theirs(batch())
        expected.sin().mean().backward()
        assert torch.equal(found, expected)
        assert torch.equal(loss, expected.sin().mean())
        assert differing(gradients(theirs), gradients(ours)) == []


def test_program_without_a_loss_is_refused() -> None:
    """Nobody says which gradients its outputs get."""
    model, optimizer = small()
    with pytest.raises(UsageError, match="backward=loss"):
        whence.capture(model, (batch(),), backward=True).bind(model)
    with pytest.raises(UsageError, match="knows no optimizer"):
        whence.capture(model, (batch(),)).bind(model, optimizer)


class Exchanging(nn.Module):
    """Two buffers change places in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.first, self.second = nn.Buffer(torch.zeros(2)), nn.Buffer(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.first, self.second = self.second, self.first
        return x * self.weight + self.first


def test_buffers_may_change_places() -> None:
    """What is written does not change what is written next."""
    ours, theirs = Exchanging(), Exchanging()
    optimizer, other = plain_sgd(ours), plain_sgd(theirs)
    x = torch.ones(2)
    program = whence.capture_step(zero_first(ours, optimizer), (x,), model=ours, optimizer=optimizer)
    run, step = program.bind(ours, optimizer), zero_first(theirs, other)
    for _ in range(3):
        assert torch.equal(run(x), step(x))
        assert differing(state(theirs), state(ours)) == []


class Sharing(nn.Module):
    """Two parameters whose gradient is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.first + self.second)


def test_gradients_have_memory_of_their_own() -> None:
    """A gradient that is changed afterwards changes no other."""
    model = Sharing()
    optimizer = SGD(model.parameters(), lr=0.1)
    program = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    program.bind(model, optimizer)(batch())
    kept = model.second.grad.clone()  # type: ignore[union-attr]
    model.first.grad.zero_()  # type: ignore[union-attr]
    assert torch.equal(model.second.grad, kept)  # type: ignore[arg-type]


def test_autocast_is_as_it_was() -> None:
    """The casts are part of the program."""
    program, model, optimizer = captured()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises((CallError, StaleCapture), match="autocast"):
        program.bind(model, optimizer)(batch())


class Counted(nn.Module):
    """Does something else after its third call, by a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0
        self.decides = True

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.inner(x)
        return found.sin() if self.decides and self.calls > 3 else found


def test_inference_mode_is_refused() -> None:
    """What is made in it could not be trained with later; `no_grad` does no harm, and a forward runs."""
    program, model, optimizer = captured()
    joint = whence.capture(model, (batch(),), backward=lambda out: out.sum()).bind(model)
    with torch.no_grad():
        forward = whence.capture(model, (batch(),)).bind(model)
    before = state(model)
    with torch.inference_mode():
        forward(batch())
        for run in (program.bind(model, optimizer), joint):
            with pytest.raises(CallError, match=r"the program trains, and torch.inference_mode\(\) is on"):
                run(batch())
    assert differing(before, state(model)) == []
    assert optimizer.state == {} and all(held.grad is None for held in model.parameters())
    (eager, theirs), run = small(), program.bind(model, optimizer)
    with torch.no_grad():
        found = run(batch())
    assert torch.equal(found, zero_first(eager, theirs)(batch()))
    assert differing(state(eager), state(model)) == []


@pytest.mark.parametrize("make", [SGD, Adam])
def test_schedule_of_a_tensor_rate(make: Callable[..., Optimizer]) -> None:
    """A schedule notes what a rate began with as another tensor, which no step reads."""
    (model, _), (eager, _) = small(), small()
    optimizer, theirs = (make(one.parameters(), lr=torch.tensor(0.1)) for one in (model, eager))
    schedules = [ExponentialLR(one, 0.5) for one in (optimizer, theirs)]
    program = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    run, step = program.bind(model, optimizer), zero_first(eager, theirs)
    for _ in range(2):
        assert torch.equal(run(batch()), step(batch()))
        for schedule in schedules:
            schedule.step()
    optimizer.param_groups[0]["initial_lr"] = torch.tensor(0.1)
    assert torch.equal(run(batch()), step(batch()))
    assert differing(state(eager), state(model)) == []


def test_optimizer_without_a_schedule() -> None:
    """What a rate began with is of no concern where it is not known."""
    (model, optimizer), (other, theirs) = small(), small()
    ExponentialLR(optimizer, 0.5)
    program = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    program.bind(other, theirs)(batch())


def test_model_that_counts_its_calls() -> None:
    """The program counts, too, on the model that was captured alone."""
    model = Counted()
    model.decides = False
    optimizer = plain_sgd(model)
    program = whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    before = model.calls
    run(batch()), run(batch())
    assert model.calls == before + 2
    other = Counted()
    with pytest.raises(UsageError, match="of the captured model"):
        program.bind(other, plain_sgd(other))


def test_a_written_argument_is_no_other_argument() -> None:
    """A tensor that the program writes must be no other argument, too: eager would see the write in both."""

    def advanced(total: Tensor, x: Tensor) -> Tensor:
        total.add_(1)
        return total * x

    run = whence.capture(advanced, (torch.ones(3), torch.ones(3))).bind(advanced)
    both = torch.ones(4)
    for pair in ((both[:3], both[:3]), (both[:3], both[1:]), (both, both)):
        with pytest.raises((CallError, StaleCapture)):
            run(*pair)
    assert torch.equal(both, torch.ones(4))
    total = torch.ones(3)
    with pytest.raises(StaleCapture, match=r"args\[0\] and args\[1\] in one memory"):
        run(total, total)
    assert torch.equal(total, torch.ones(3))


class Totals(nn.Module):
    """Adds to a buffer and to its first argument, and computes with the second."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.register_buffer("total", torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.total += 1
        x.add_(1)
        return y * self.total + self.scale


@pytest.mark.parametrize("form", ["bind", "module", "unflatten"])
def test_a_written_tensor_is_no_state_and_argument(form: str) -> None:
    """State that is written, or read where an argument is written, must be no argument, too."""
    model = Totals()
    with pytest.raises(UnsupportedMutation, match="total is written, and shares its memory with y"):
        whence.capture(model, (torch.ones(4), model.total))
    program = whence.capture(model, (torch.ones(4), torch.ones(4)))
    run = program.bind(model) if form == "bind" else getattr(program, form)()
    for given in (
        (torch.ones(4), model.total),
        (torch.ones(4), model.total[:]),
        (model.scale.data, torch.ones(4)),
    ):
        with pytest.raises(CallError, match="share memory, and did not at capture"):
            run(*given)
    assert model.total.sum() == 0
    run(torch.ones(4), model.scale.data)  # neither is written


class Derived(nn.Module):
    """Holds a tensor that is computed of another, which is not in it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sum()


def test_a_backward_that_goes_on_outside() -> None:
    """Arguments and constants that came of others are refused, for eager's backward reaches those; autograd
    goes through a flat module."""
    x, outside = torch.ones(2, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    model = Derived(outside)
    program = whence.capture(model, (x,), backward=torch.sum)
    run = program.bind(model)
    with pytest.raises(CallError, match=r"args\[0\] came of other tensors"):
        run(x * 2)
    model.weight = outside * 2
    with pytest.raises(CallError, match=r"weight came of other tensors"):
        run(x)
    assert x.grad is None and outside.grad is None
    program.module()(x * 2)[0].backward()
    assert x.grad is not None and outside.grad is not None


@pytest.mark.parametrize("backward", [False, torch.sum], ids=["forward", "joint"])
def test_a_tensor_attribute_is_that_of_each_run(backward: Any) -> None:
    """One that takes the place of another under its name is what the next run computes with."""
    model, x = Derived(torch.ones(4, 4)), torch.ones(2, 4, requires_grad=True)
    run = whence.capture(model, (x,), backward=backward).bind(model)
    for scale in (1.0, 3.0, 5.0):
        model.weight = torch.full((4, 4), scale)
        result = run(x)
        assert torch.equal(result[1] if backward else result, model(x))


class Noting(nn.Module):
    """Copies its argument over a tensor that it holds, and never reads that."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x)
        return x * 2


@pytest.mark.parametrize("form", ["bind", "module", "unflatten"])
def test_a_constant_that_is_only_written(form: str) -> None:
    """It is written in every run."""
    model = Noting()
    program = whence.capture(model, (torch.ones(2, 4),))
    run = program.bind(model) if form == "bind" else getattr(program, form)()
    for scale in (2.0, 3.0):
        run(torch.full((2, 4), scale))
        assert torch.equal(model.last, torch.full((2, 4), scale))


TABLE: dict[str, Any] = {}
LAST = 0


class Leaving(nn.Module):
    """Leaves plain values behind, the same in every run, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.around = SimpleNamespace(rows=0)

    def forward(self, x: Tensor) -> Tensor:
        global LAST
        LAST, TABLE["name"] = 7, "last"
        self.around.rows, self.width = len(x), x.shape[1]
        result: Tensor = self.linear(x)
        return result


def left(model: Leaving) -> tuple[Any, ...]:
    """What there is now, and nothing afterwards."""
    global LAST
    found = LAST, dict(TABLE), model.around.rows, vars(model).pop("width", None)
    LAST, model.around.rows = 0, 0
    TABLE.clear()
    return found


@pytest.mark.parametrize("backward", [False, mean_sine])
def test_plain_values_are_left_as_eager_leaves_them(backward: Any, tmp_path: Path) -> None:
    """In variables, containers, objects and modules; of the model that is bound, and not of another one."""
    model, other, x = Leaving(), Leaving(), torch.randn(2, 4)
    program = whence.capture(model, (x,), backward=backward)
    assert left(model) == (0, {}, 0, None)
    model(x)
    expected = left(model)
    assert expected == (7, {"name": "last"}, 2, 4)
    for _ in range(2):
        program.bind(model)(x)
        assert left(model) == expected
    program.bind(other)(x)
    assert left(other)[3] is None and left(model)[3] is None
    program.save(tmp_path / "program.whence")
    whence.load(tmp_path / "program.whence", model=model).bind(model)(x)
    assert left(model)[0] == expected[0]  # a file knows variables by their names


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.param_groups[0].update(kind=int),
        lambda optimizer: optimizer.param_groups[0]["names"].add("more"),
        lambda optimizer: next(iter(optimizer.state.values()))["begun"].clear(),
        lambda optimizer: next(iter(optimizer.state.values())).update(kind=int),
    ],
    ids=["class", "set", "set of a parameter", "class of a parameter"],
)
def test_classes_and_sets_of_an_optimizer_are_constants(change: Callable[[Any], object]) -> None:
    """Other ones are refused."""
    training = classes_and_sets_that_are_there()
    training.step(*training.batches[0])
    held: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
    run = whence.capture_step(training.step, training.batches[0], **held).bind(*held.values())
    run(*training.batches[0])
    change(training.optimizer)
    with pytest.raises(StaleCapture, match="at capture"):
        run(*training.batches[0])


def test_functions_in_the_groups_of_an_optimizer_are_constants(tmp_path: Path) -> None:
    """Another one is refused, and every one where the program was loaded: a file knows their names alone."""
    model, _ = small()
    held: dict[str, Any] = {"model": model, "optimizer": Filtering(model.parameters())}
    program = whence.capture_step(zero_first(*held.values()), (batch(),), **held)
    program.save(tmp_path / "program.whence")
    program.bind(*held.values())(batch())
    loaded = whence.load(tmp_path / "program.whence", model=model).bind(*held.values())
    with pytest.raises(StaleCapture, match="a file keeps of a function its name alone"):
        loaded(batch())
    held["optimizer"].param_groups[0]["decays"] = lambda _: True
    with pytest.raises(StaleCapture, match=r"\['decays'\]. was <function is_a_matrix"):
        program.bind(*held.values())(batch())
