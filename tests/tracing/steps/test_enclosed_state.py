"""A scaler of gradients that a step closes over is state: its scale is written as eager writes it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import whence
from tests.checks import differing, state
from tests.tracing.steps.small import batch, small


@functools.lru_cache(maxsize=2)
def table(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size)


@functools.cache
def tables(size: int) -> dict[str, Tensor]:
    return {"scales": torch.linspace(0.5, 1.5, size)}


CACHES: dict[str, Callable[[int], Tensor]] = {
    "a tensor": table,
    "in a dictionary": lambda size: tables(size)["scales"],
}


class Trainer:
    """Trains with a scaler."""

    def __init__(self) -> None:
        self.model, self.optimizer = small()
        self.scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).sin().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


def captured() -> tuple[Trainer, whence.Program]:
    trainer = Trainer()
    trainer.step(batch())
    held = {"model": trainer.model, "optimizer": trainer.optimizer}
    return trainer, whence.capture_step(trainer.step, (batch(),), decide="example", **held)  # type: ignore[arg-type]


def test_the_scale_is_written() -> None:
    """Three runs leave the scale, its tracker and everything else where eager leaves them."""
    (trainer, program), eager = captured(), Trainer()
    eager.step(batch())
    run = program.bind(trainer.model, trainer.optimizer)
    for _ in range(3):
        assert torch.equal(run(batch()), eager.step(batch()))
        assert trainer.scaler.state_dict() == eager.scaler.state_dict()
        assert differing(state(eager.model), state(trainer.model)) == []


def test_verify_leaves_the_scaler_as_it_was() -> None:
    """It runs eager and the program, and gives the scale back."""
    trainer, program = captured()
    before = trainer.scaler.state_dict()
    result = program.verify(trainer.model, (batch(),))
    assert result.ok, str(result)
    assert trainer.scaler.state_dict() == before


def test_gradients_that_are_not_finite_are_another_way() -> None:
    """Eager skips the optimizer: the program says so, and writes nothing."""
    trainer, program = captured()
    before, scale = state(trainer.model), trainer.scaler.state_dict()
    with pytest.raises(whence.StaleCapture, match="at capture"):
        program.bind(trainer.model, trainer.optimizer, on_violation="raise")(batch() * torch.inf)
    assert differing(before, state(trainer.model)) == []
    assert trainer.scaler.state_dict() == scale


def test_a_scale_that_the_first_step_makes() -> None:
    """The scaler makes it when it is first asked, and a capture asks: it is the same number."""
    trainer, eager = Trainer(), Trainer()
    held: dict[str, Any] = {"model": trainer.model, "optimizer": trainer.optimizer}
    before = trainer.scaler.state_dict()
    program = whence.capture_step(trainer.step, (batch(),), decide="example", **held)
    assert trainer.scaler.state_dict() == before
    run = program.bind(**held)
    for scale in (1.0, 2.0, torch.inf, 1.0):
        run(batch() * scale), eager.step(batch() * scale)
        assert differing(state(trainer.model), state(eager.model)) == []
        assert trainer.scaler.state_dict() == eager.scaler.state_dict()


def filled_and_emptied(held: dict[str, list[Tensor]], model: nn.Module) -> Callable[[Tensor], None]:
    def step(x: Tensor) -> None:
        held["losses"].append(model(x).sin().mean())
        held["losses"][0].backward()
        held["losses"].clear()

    return step


def test_a_list_that_is_empty_again_is_no_change() -> None:
    """What comes and goes within a step is nothing that the next one finds."""
    model, _ = small()
    program = whence.capture_step(filled_and_emptied({"losses": []}, model), (batch(),), model=model)
    assert program.verify(model, (batch(),)).ok


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("scales", CACHES.values(), ids=CACHES)
@pytest.mark.sweep
def test_caches_of_calls_hold_nothing_of_a_capture(scales: Callable[[int], Tensor], counts: bool) -> None:
    """However often it has to look: who asks a cache afterwards gets what eager gets."""
    (ours, optimizer), (theirs, other), found = small(), small(), []
    for model, its, is_captured in ((ours, optimizer, True), (theirs, other, False)):
        table.cache_clear()
        tables.cache_clear()
        kept = [0]

        def step(x: Tensor, model: Any = model, its: Any = its, kept: list[int] = kept) -> Tensor:
            its.zero_grad()
            loss: Tensor = (model(x) * scales(1)).sin().mean()
            loss.backward()
            its.step()
            kept[0] += counts
            return loss.detach()

        run: Any = step
        if is_captured:
            run = whence.capture_step(step, (batch(),), model=model, optimizer=its).bind(model, its)
            assert torch.equal(scales(2), torch.linspace(0.5, 1.5, 2))
        found.append([run(batch()).item(), run(batch()).item(), kept[0]])
    assert found[0] == found[1] and differing(state(theirs), state(ours)) == []
