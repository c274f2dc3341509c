"""A first step that is another program than all others is taken by the step itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import whence
from tests.checks import differing, state
from tests.tracing.steps.small import batch, small, zero_first

Step = Callable[[Tensor], Any]


def training(body: Callable[[Any, Tensor, Tensor], Any], **options: Any) -> tuple[Any, Step, dict[str, Any]]:
    """What a step keeps, the step, and what it runs on."""
    model, kept = small()[0], SimpleNamespace(mean=None, lines=[], twice=eval("lambda x: x * 2", {}))
    optimizer = SGD(model.parameters(), lr=0.1, **options)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).sin().square().mean()
        loss.backward()
        optimizer.step()
        body(kept, x, loss)
        return loss

    return kept, step, {"model": model, "optimizer": optimizer}


def nothing(_kept: Any, _x: Tensor, _loss: Tensor) -> None:
    pass


def begins_a_mean(kept: Any, x: Tensor, _loss: Tensor) -> None:
    if kept.mean is None:
        kept.mean = x.mean()


def calls_what_no_file_defines(kept: Any, x: Tensor, loss: Tensor) -> None:
    begins_a_mean(kept, kept.twice(x), loss)


ROWS = [
    (nothing, {"momentum": 0.9}),
    (begins_a_mean, {}),
    (begins_a_mean, {"momentum": 0.9}),
    (calls_what_no_file_defines, {"momentum": 0.9}),
]


@pytest.mark.parametrize(("body", "options"), ROWS)
def test_steps_are_eager(body: Any, options: dict[str, Any]) -> None:
    """From the first one on, without a step taken before the capture, which changes nothing."""
    (kept, step, held), (theirs, eager, other) = training(body, **options), training(body, **options)
    before = state(held["model"])
    program = whence.capture_step(step, (batch(),), **held)
    assert program.step is not None
    assert program.step.second
    assert program.verify(held["model"], (batch(),)).ok
    assert differing(before, state(held["model"])) == []
    assert kept.mean is None
    assert dict(held["optimizer"].state) == {}
    run = program.bind(**held)
    for scale in (1.0, 0.5, 2.0):
        assert torch.equal(run(batch() * scale), eager(batch() * scale))
        assert differing(state(held["model"]), state(other["model"])) == []
        assert (kept.mean is None) == (theirs.mean is None)
        assert kept.mean is None or torch.equal(kept.mean, theirs.mean)


def test_another_optimizer_has_to_have_begun() -> None:
    """The step does not run it: its first step is refused, and so is one of a bound step that is to raise."""
    _, step, held = training(nothing, momentum=0.9)
    program = whence.capture_step(step, (batch(),), **held)
    fresh = SGD(held["model"].parameters(), lr=0.1, momentum=0.9)
    for run in (program.bind(held["model"], fresh), program.bind(**held, on_violation="raise")):
        with pytest.raises(whence.StaleCapture, match="take one step with this optimizer"):
            run(batch())


def test_what_is_made_first_and_read_then_is_refused() -> None:
    """It would be a constant: that of a step which was given back."""

    def reads(kept: Any, x: Tensor, loss: Tensor) -> None:
        begins_a_mean(kept, x, loss)
        kept.lines.append((kept.mean * 2).item())

    kept, step, held = training(reads)
    with pytest.raises(whence.UnsupportedStep, match=r"reads kept\.mean, and changes it"):
        whence.capture_step(step, (batch(),), **held)
    assert kept.mean is None
    assert kept.lines == []


class Widens(nn.Module):
    """Its first call makes the kernel that later ones read, as speechbrain's ContextWindow does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first, self.kernel = True, torch.eye(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            self.is_first, self.kernel = False, self.kernel.repeat(2, 1)
        return x @ self.kernel.T


def test_what_a_module_makes_first_is_refused() -> None:
    """A tensor that its first call makes is a constant of the step that was given back, too."""
    model, x = nn.Sequential(Widens(), nn.Linear(8, 4)), batch()
    optimizer = SGD(model.parameters(), lr=0.1)
    step = zero_first(model, optimizer)
    with pytest.raises(whence.UnsupportedStep, match=r"reads 0\.is_first, and changes it"):
        whence.capture_step(step, (x,), model=model, optimizer=optimizer)
    step(x)
    program = whence.capture_step(step, (x,), model=model, optimizer=optimizer)
    assert program.verify(model, (x,)).ok


class Chosen(nn.Linear):
    """Takes the columns that a mask names, by their numbers."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.tensor([True, False, True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, self.mask.nonzero().squeeze(-1)])


def test_a_size_of_data_in_a_first_step() -> None:
    """Momentum that has not begun is found where the model is captured with open numbers, too."""
    model, x = Chosen(), batch()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = zero_first(model, optimizer)
    program = whence.capture_step(step, (x,), model=model, optimizer=optimizer)
    assert program.step is not None
    assert program.step.second
    run = program.bind(model, optimizer)
    assert run(x) > run(x)


def test_options_are_named() -> None:
    """A bound step captures again, or raises."""
    _, step, held = training(nothing)
    with pytest.raises(whence.UsageError, match="on_violation cannot be 'warn'"):
        whence.capture_step(step, (batch(),), **held).bind(**held, on_violation="warn")


def test_an_edited_program_is_not_captured_again() -> None:
    """What was edited would be lost."""
    _, step, held = training(nothing, momentum=0.9)
    step(batch())
    counts = SimpleNamespace(taken=0)

    def other(x: Tensor) -> Any:
        counts.taken += 1
        return step(x * 2 if counts.taken > 1 else x)

    program = whence.capture_step(other, (batch(),), **held)
    assert len(program.bind(**held)(batch()).shape) == 0
    with pytest.raises(whence.StaleCapture, match="a branch goes another way"):
        program.decompose().bind(**held)(batch())


def test_modules_are_given_back() -> None:
    """Also where the step reaches more than the model."""
    other = nn.Linear(4, 4)
    _, step, held = training(lambda kept, x, _loss: begins_a_mean(kept, other(x).detach(), x))
    before = state(other)
    whence.capture_step(step, (batch(),), **held)
    assert differing(before, state(other)) == []


class WarmsUp(SGD):
    """Momentum that is the first gradient, and from the third step on a greatest rate that it keeps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.param_groups[0].update(count=0, greatest=0.0)

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        group["count"] += 1
        rate = 0.05 * group["count"] if group["count"] > 2 else 0.0
        group["greatest"] = max(rate, group["greatest"])
        for parameter in group["params"]:
            parameter.grad.mul_(1 + group["greatest"])
        return super().step(closure)


def test_a_constant_that_later_steps_advance() -> None:
    """A step that goes another way from then on is captured again, where the step itself took one, too."""
    runs = []
    for captures in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = WarmsUp(model.parameters())

        def step(x: Tensor, model: nn.Module = model, optimizer: SGD = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        held: dict[str, Any] = {"model": model, "optimizer": optimizer}
        run = whence.capture_step(step, (batch(),), **held).bind(**held) if captures else step
        losses = [run(batch() * scale).item() for scale in range(1, 8)]
        runs.append((losses, optimizer.param_groups[0]["greatest"], state(model)))
    (losses, greatest, ours), (expected, theirs, eager) = runs
    assert (losses, greatest) == (expected, theirs)
    assert differing(ours, eager) == []


class MakesItsMask(nn.Linear):
    """Makes a buffer anew in each call, of what it held or not, and in one of two ways."""

    mask: Tensor

    def __init__(self, *, registers: bool, grows: bool = False) -> None:
        super().__init__(4, 2)
        self.registers, self.grows = registers, grows
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        held = self.mask if not self.grows else torch.ones(6, 2)
        mask = held * 0.5 + x.sum(1, keepdim=True)[:2, 0] if not self.grows else held
        if self.registers:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask
        return super().forward(x) * self.mask


def masked(**options: Any) -> tuple[Step, dict[str, Any]]:
    torch.manual_seed(0)
    model = MakesItsMask(**options)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return zero_first(model, optimizer), {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("registers", [False, True])
def test_a_buffer_that_each_call_makes_anew(registers: bool) -> None:
    """It is the model's own whose numbers the program takes, and not the one that the first step made."""
    (step, held), (eager, other) = masked(registers=registers), masked(registers=registers)
    program = whence.capture_step(step, (batch(),), **held)
    assert program.step is not None
    assert program.step.second
    assert program.state["b_mask"] is held["model"].mask
    assert program.verify(held["model"], (batch(),)).ok
    run = program.bind(**held)
    for scale in (1.0, 0.5, 2.0):
        assert torch.equal(run(batch() * scale), eager(batch() * scale))
        assert differing(state(held["model"]), state(other["model"])) == []


def test_a_buffer_of_another_shape_takes_a_step_before() -> None:
    """A program of the later ones would not fit the model that it is of."""
    step, held = masked(registers=False, grows=True)
    with pytest.raises(whence.UnsupportedStep, match="take a step with the optimizer before"):
        whence.capture_step(step, (batch(),), **held)
    step(batch())
    assert whence.capture_step(step, (batch(),), **held).verify(held["model"], (batch(),)).ok
