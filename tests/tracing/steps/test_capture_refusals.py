"""What one program cannot repeat is refused, with the reason and the remedy, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer, RAdam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import differing, parts, surroundings
from tests.tracing.steps.small import Step, batch, plain_sgd, small, zero_first, zero_last
from whence.errors import (
    DataDependent,
    NotCallable,
    UnsupportedHook,
    UnsupportedStep,
    UsageError,
    WhenceError,
)

OUTSIDE = nn.Parameter(torch.ones(2))
AVERAGE = torch.zeros(8, 4)
OTHERS: dict[str, Any] = {}
"""What the step of the test that runs changes beside the model."""


class Listing(Optimizer):
    """Keeps a list in its state that grows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for held in self.param_groups[0]["params"]:
            state = self.state[held]
            state["taken"] = [*state.get("taken", ()), 1.0]
            held.sub_(held.grad, alpha=0.1)


def with_closure(model: nn.Module, optimizer: Optimizer) -> Step:
    optimizer = LBFGS(model.parameters())

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).sin().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


def with_scaler(model: nn.Module, optimizer: Optimizer) -> Step:
    scaler = torch.amp.GradScaler("cpu")

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def with_schedule(model: nn.Module, optimizer: Optimizer) -> Step:
    schedule, inner = ExponentialLR(optimizer, 0.9), zero_first(model, optimizer)
    optimizer.step()  # or the schedule warns

    def step(x: Tensor) -> Any:
        loss = inner(x)
        schedule.step()
        return loss * schedule.last_epoch

    OTHERS["schedule"] = vars(schedule)
    return step


def counting_variable(model: nn.Module, optimizer: Optimizer) -> Step:
    inner, taken, losses = zero_first(model, optimizer), 0, list[Tensor]()

    def step(x: Tensor) -> None:
        nonlocal taken
        taken += len(losses)
        losses.append(inner(x).detach())
        OTHERS["taken"] = taken

    OTHERS["taken"] = taken
    return step


def with_hook(model: nn.Module, optimizer: Optimizer) -> Step:
    optimizer.register_step_post_hook(lambda *_: None)
    return zero_first(model, optimizer)


def with_another(model: nn.Module, optimizer: Optimizer) -> Step:
    return zero_first(model, plain_sgd(model))


def with_outside(model: nn.Module, optimizer: Optimizer) -> Step:
    step = zero_first(model, optimizer)
    step.optimizer = SGD([*model.parameters(), OUTSIDE], lr=0.1)  # type: ignore[attr-defined]
    return step


def differentiates_outside(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> None:
        (model(x) * OUTSIDE).sum().backward()
        optimizer.step()

    return step


def turns_a_buffer(model: nn.Module, optimizer: Optimizer) -> Step:
    model.register_buffer("zero", torch.tensor(0.0))

    def step(x: Tensor) -> None:
        (model(x).sum() + model.zero.requires_grad_()).backward()
        optimizer.step()

    return step


def sets_outside(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> None:
        model(x).sum().backward()
        OUTSIDE.grad = model[2].bias.grad  # type: ignore[index]

    return step


def reentrant(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> None:
        found: Any = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
        found.sum().backward()
        optimizer.step()

    return step


def using(step: Step) -> Step:
    """The step with the optimizer that it closes over as the one to capture."""
    step.optimizer = next(  # type: ignore[attr-defined]
        cell.cell_contents
        for cell in step.__closure__  # type: ignore[union-attr]
        if isinstance(cell.cell_contents, Optimizer)
    )
    return step


def listing(model: nn.Module, optimizer: Optimizer) -> Step:
    return using(zero_first(model, Listing(model)))


def listed(model: nn.Module, optimizer: Optimizer) -> Step:
    step = listing(model, optimizer)
    step(batch())
    return step


def sets(model: nn.Module, optimizer: Optimizer) -> Step:
    held = Listing(model)
    held.state[next(model.parameters())]["taken"] = [{(1.0,)}]
    return using(zero_first(model, held))


def deciding(model: nn.Module, optimizer: Optimizer) -> Step:
    return using(zero_first(model, RAdam(model.parameters())))


def reading(model: nn.Module, optimizer: Optimizer) -> Step:
    inner = zero_first(model, optimizer)
    return lambda x: inner(x) if inner(x).item() > 0 else x


def tensor_decay(model: nn.Module, optimizer: Optimizer) -> Step:
    optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.1)
    return zero_first(model, optimizer)


@dataclass(frozen=True)
class Refused:
    """A step, the class of its error, and words of its message."""

    make: Callable[[nn.Module, Optimizer], Step]
    error: type[WhenceError]
    words: str


REFUSED = [
    Refused(with_closure, DataDependent, "the optimizer decides by the number"),
    Refused(with_scaler, DataDependent, "GradScaler"),
    Refused(with_schedule, UnsupportedStep, "reads ExponentialLR.last_epoch after it"),
    Refused(counting_variable, UnsupportedStep, "reads losses, and changes it"),
    Refused(with_hook, UnsupportedHook, "hooks on the optimizer's step"),
    Refused(with_another, UnsupportedStep, "was not given"),
    Refused(with_outside, UnsupportedStep, "not in Sequential"),
    Refused(differentiates_outside, UnsupportedStep, "outside the model gets a gradient"),
    Refused(turns_a_buffer, UnsupportedStep, "run the step once before the capture"),
    Refused(sets_outside, UnsupportedStep, "sets the .grad"),
    Refused(reentrant, UnsupportedStep, "use_reentrant=False"),
    Refused(listing, UnsupportedStep, r"makes optimizer\.state.*\['taken'\]"),
    Refused(listed, UnsupportedStep, r"makes optimizer\.state.*\[1\]"),
    Refused(sets, UnsupportedStep, r"keeps optimizer\.state.*\[0\] as a set"),
    Refused(deciding, DataDependent, "the optimizer decides by the number"),
    Refused(reading, DataDependent, "the step decides by the number"),
    Refused(tensor_decay, DataDependent, "a branch"),
]


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All that a capture must leave as it is."""
    outside = {"gradient outside": id(OUTSIDE.grad), "written outside": AVERAGE.clone()}
    outside |= {name: str(held) for name, held in OTHERS.items()}
    return {**parts(model), **held_by(optimizer), **surroundings(), **outside}


def held_by(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer holds, by identity."""
    state = {
        id(key): {name: id(value) for name, value in held.items()} for key, held in optimizer.state.items()
    }
    groups = [{name: id(value) for name, value in group.items()} for group in optimizer.param_groups]
    return {
        "state": state,
        "groups": groups,
        "attributes": {name: id(x) for name, x in vars(optimizer).items()},
    }


@pytest.mark.sample(8)
@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.make.__name__)
def test_refusal_leaves_no_trace(row: Refused) -> None:
    """The error says why and what to do; model, gradients, optimizer and random numbers are as before."""
    model, optimizer = small()
    step = row.make(model, optimizer)
    optimizer = getattr(step, "optimizer", optimizer)
    before = everything(model, optimizer)
    with pytest.raises(row.error, match=row.words) as caught:
        whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert caught.value.remedy
    assert differing(before, everything(model, optimizer)) == []


@pytest.mark.parametrize("make", [small, lambda: (m := small()[0], plain_sgd(m))], ids=["adamw", "sgd"])
def test_capture_leaves_no_trace(make: Callable[[], tuple[nn.Module, Optimizer]]) -> None:
    """So does a capture that succeeds, with gradients of before that the step zeroes."""
    model, optimizer = make()
    model(batch()).sum().backward()
    before = everything(model, optimizer)
    whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    assert differing(before, everything(model, optimizer)) == []


def test_error_of_the_step_stays_its_own() -> None:
    """An error in the step is raised as it is, with a note."""
    model, optimizer = small()

    def step(x: Tensor) -> None:
        zero_first(model, optimizer)(x)
        raise KeyError("mine")

    before = everything(model, optimizer)
    with pytest.raises(KeyError, match="mine") as caught:
        whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert "whence was capturing step" in caught.value.__notes__[0]
    assert differing(before, everything(model, optimizer)) == []


def test_bad_arguments_are_named() -> None:
    """A model that is no module, a step that is no function, an optimizer that is none, and inputs with a
    history."""
    model, optimizer = small()
    step = zero_last(model, optimizer)
    with pytest.raises(NotCallable, match="the model of a step is a str"):
        whence.capture_step(step, (batch(),), model="model")  # type: ignore[arg-type]
    with pytest.raises(NotCallable, match="the step is a Sequential"):
        whence.capture_step(model, (batch(),), model=model)
    with pytest.raises(UsageError, match="the optimizer is a str"):
        whence.capture_step(step, (batch(),), model=model, optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedStep, match="came of other tensors"):
        whence.capture_step(step, (batch().requires_grad_() * 2,), model=model, optimizer=optimizer)


def test_modules_are_not_given_back() -> None:
    """A step has no modules to run: `module`, `unflatten`, `guarded` and the export say so."""
    model, optimizer = small()
    program = whence.capture_step(zero_last(model, optimizer), (batch(),), model=model, optimizer=optimizer)
    for ask in (
        program.module,
        program.unflatten,
        lambda: program.unflatten(onto=model),
        lambda: program.guarded(model),
    ):
        with pytest.raises(UsageError, match=r"program.bind\(model, optimizer\)"):
            ask()
    with pytest.raises(whence.NotExportable):
        program.to_exported_program()


def test_loss_without_a_gradient() -> None:
    """A loss that needs no gradient is autograd's own error, as in eager."""
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> None:
        model(x).detach().sum().backward()

    for run in (step, lambda x: whence.capture_step(step, (x,), model=model)):
        with pytest.raises(RuntimeError, match="does not require grad"):
            run(torch.ones(2, 4))


class OfItsOwn(Optimizer):
    """Hands every step on to another optimizer, and has groups of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = [dict(group) for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def test_an_optimizer_with_groups_of_its_own_around_another() -> None:
    """It does not stand for the one inside, which is passed itself: refused, here and in `bind`."""
    model, optimizer = small()
    wrapper = OfItsOwn(optimizer)
    step = zero_first(model, optimizer)
    with pytest.raises(UsageError, match=r"a OfItsOwn(.|\n)*pass that one \(\.optimizer\)"):
        whence.capture_step(step, (batch(),), model=model, optimizer=wrapper)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert program.verify(model, (batch(),)).ok
    with pytest.raises(UsageError, match="needs an optimizer"):
        program.bind(model, wrapper)


@pytest.mark.parametrize("flag", ["training", "requires_grad"])
def test_a_flag_that_a_step_leaves_otherwise_is_named(flag: str) -> None:
    """A program leaves flags of the model as they are; a step that sets one back is captured."""
    model, optimizer = small()
    inner = zero_first(model, optimizer)

    def step(x: Tensor) -> Any:
        loss = inner(x)
        model.eval() if flag == "training" else model[0].requires_grad_(False)
        return loss

    def back(x: Tensor) -> Any:
        loss = step(x)
        model.train().requires_grad_(True)
        return loss

    with pytest.raises(whence.errors.UnsupportedStep, match=f"the step changes .*{flag}"):
        whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert model.training and model[0].weight.requires_grad
    assert whence.capture_step(back, (batch(),), model=model, optimizer=optimizer).graph
