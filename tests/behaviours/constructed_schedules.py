"""Training steps that call schedules of the learning rate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import whence
from tests.behaviours.constructed_steps import STEPS, Training, network, plain, step
from tests.behaviours.constructions import Refusal

__all__ = ["STEPS"]

Body = Callable[[Any, Tensor, dict[str, Any]], Any]
LATER = Refusal(
    whence.UnsupportedStep, "moves numbers, and the step reads", "the next step has what it moves"
)
FIXED = Refusal(whence.UnsupportedStep, "needed in Python", "a branch wants the number itself")
REACHES = Refusal(whence.UnsupportedStep, "LambdaLR reaches taken", "the schedule runs when all else is done")


class Scheduled:
    """A trainer with a schedule."""

    def __init__(
        self,
        make: Callable[[Optimizer], Any],
        optimizer: Optimizer | None = None,
        call: Callable[[Any, Tensor], Any] = lambda schedule, _: schedule.step(),
    ) -> None:
        self.model = network()
        self.optimizer = AdamW(self.model.parameters()) if optimizer is None else optimizer
        if optimizer is not None:
            optimizer.param_groups[0]["params"][:] = list(self.model.parameters())
        self.schedule, self.call, self.rates = make(self.optimizer), call, list[float]()

    def step(self, x: Tensor) -> Tensor:
        loss = plain(self.model, self.optimizer)(x)
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.call(self.schedule, loss)
        return loss

    def training(self) -> Training:
        return Training(
            self.model, self.optimizer, self.step, kept=lambda: (self.rates, held_by(self.schedule))
        )


def held_by(schedule: LRScheduler) -> dict[str, Any]:
    """What a schedule holds, and those inside it."""
    inner = [held_by(each) for each in getattr(schedule, "_schedulers", ())]
    kinds = (int, float, list)
    own = {
        key: value
        for key, value in vars(schedule).items()
        if isinstance(value, kinds) and key != "lr_lambdas"
    }
    return {**own, "_schedulers": inner}


def momentum(**options: Any) -> SGD:
    return SGD(network().parameters(), lr=0.1, **options)


def add(name: str, make: Callable[[Optimizer], Any], *, warm: bool = False, **options: Any) -> None:
    """A row of the table."""

    def build() -> Training:
        held = {key: value() if key == "optimizer" else value for key, value in options.items()}
        return Scheduled(make, **held).training()

    build.__name__ = name
    step(warm=warm)(build)


add("schedule_inside", lambda optimizer: ExponentialLR(optimizer, 0.9))
add("warmup_inside", lambda optimizer: LambdaLR(optimizer, lambda at: min(1.0, at / 3)), optimizer=momentum)
add("steps_of_two", lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
add("milestones", lambda optimizer: MultiStepLR(optimizer, [1, 2], gamma=0.5))
add("cosine", lambda optimizer: CosineAnnealingLR(optimizer, 4))
add("restarts", lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2), optimizer=momentum)
add("one_cycle", lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=10))
add(
    "one_cycle_of_sgd",
    lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9),
    warm=True,
    optimizer=momentum,
)
add("cyclic", lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, 2, cycle_momentum=False))
add("linear", lambda optimizer: LinearLR(optimizer, total_iters=3))
add("chained", lambda optimizer: ChainedScheduler([ExponentialLR(optimizer, 0.9), LinearLR(optimizer)]))
add(
    "chained_with_momentum",
    lambda optimizer: ChainedScheduler([ExponentialLR(optimizer, 0.9), LinearLR(optimizer)]),
    optimizer=lambda: momentum(momentum=0.9),
)
add(
    "warmup_then_decay",
    lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), ExponentialLR(optimizer, 0.9)], [2]),
)
add(
    "plateau_of_a_tensor",
    lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=1.0),
    call=lambda schedule, loss: schedule.step(loss.detach()),
)
add(
    "plateau_of_a_number",
    lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=1.0),
    call=lambda schedule, loss: schedule.step(metrics=loss.item() + 1),
)


add(
    "rate_of_a_fused_kernel",
    lambda optimizer: ExponentialLR(optimizer, 0.9),
    optimizer=lambda: momentum(fused=True),
)
add(
    "momenta_of_fused_adamw",
    lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9),
    warm=True,
    optimizer=lambda: AdamW(network().parameters(), lr=0.1, fused=True, amsgrad=True),
)


@step(warm=True)
def warm_schedule_inside() -> Training:
    return Scheduled(lambda optimizer: ExponentialLR(optimizer, 0.9)).training()


@step(refused=LATER)
def reads_the_rate_afterwards() -> Training:
    return Scheduled(
        lambda optimizer: ExponentialLR(optimizer, 0.9),
        call=lambda schedule, loss: (schedule.step(), loss * schedule.get_last_lr()[0]),
    ).training()


@step(refused=LATER)
def steps_again_with_the_new_rate() -> Training:
    return Scheduled(
        lambda optimizer: ExponentialLR(optimizer, 0.9),
        call=lambda schedule, _: (schedule.step(), schedule.optimizer.step()),
    ).training()


@step(refused=FIXED)
def rate_is_needed_in_python() -> Training:
    trainer = Scheduled(lambda optimizer: ExponentialLR(optimizer, 0.9), optimizer=momentum())
    rates = trainer.optimizer.param_groups

    def once(x: Tensor) -> Any:
        return trainer.step(x * 2 if rates[0]["lr"] > 1 else x)

    return Training(trainer.model, trainer.optimizer, once)


@step(refused=REACHES)
def schedule_of_a_counter() -> Training:
    taken = {"at": 0}
    trainer = Scheduled(lambda optimizer: LambdaLR(optimizer, lambda _: 0.5 ** taken["at"]))

    def step(x: Tensor) -> Tensor:
        loss = trainer.step(x)
        taken["at"] += 1
        return loss

    return Training(trainer.model, trainer.optimizer, step, kept=lambda: taken)


def handing_on(report: Callable[[Any, Tensor], Any]) -> Training:
    """A step that calls its schedule, and then says what it has left."""
    trainer = Scheduled(lambda optimizer: ExponentialLR(optimizer, 0.9))
    logs = dict[str, Any](rate=1.0, rates=[])

    def step(x: Tensor) -> Any:
        loss = trainer.step(x)
        logs["rate"] = trainer.schedule.get_last_lr()[0]
        logs["rates"].append((loss.detach(), trainer.optimizer.param_groups[0]["lr"]))
        return report(trainer.schedule, loss)

    return Training(trainer.model, trainer.optimizer, step, kept=lambda: (logs, held_by(trainer.schedule)))


@step()
def hands_on_the_new_rate() -> Training:
    return handing_on(lambda schedule, loss: {"loss": loss, "rates": schedule.get_last_lr()})


@step(warm=True)
def hands_on_where_the_schedule_is() -> Training:
    return handing_on(lambda schedule, loss: (loss, schedule.last_epoch, schedule.get_last_lr()[0]))


@step(refused=LATER)
def writes_the_new_rate_as_text() -> Training:
    return handing_on(lambda schedule, loss: f"{schedule.get_last_lr()[0]:.3f}")


@step(refused=LATER)
def decides_by_the_new_rate() -> Training:
    return handing_on(lambda schedule, loss: loss if schedule.get_last_lr()[0] > 0 else -loss)


@step(
    refused=Refusal(whence.UnsupportedStep, "calls another schedule after it", "eager has the rate between")
)
def hands_on_a_rate_between_schedules() -> Training:
    return handing_on(lambda schedule, _: schedule.step())


def reading(
    body: Body,
    make: Callable[[Optimizer], Any] = lambda optimizer: ExponentialLR(optimizer, 0.9),
    **moved: bool,
) -> Training:
    """A step that reads its schedule, which is called in it, or after it where `outside`; where `loaded`, the
    optimizer has other groups after each step."""
    trainer = Scheduled(make, call=lambda *_: None)
    logs: dict[str, Any] = {"rates": [], "last": 0}

    def step(x: Tensor) -> Any:
        return body(trainer, x, logs)

    def between() -> None:
        if moved.get("outside"):
            trainer.schedule.step()
        if moved.get("loaded"):
            trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))

    kept = (logs, trainer.rates)
    return Training(
        trainer.model, trainer.optimizer, step, between, lambda: (kept, held_by(trainer.schedule))
    )


def hands_on(trainer: Scheduled, x: Tensor, logs: dict[str, Any]) -> Any:
    loss = trainer.step(x)
    logs["rates"].append(trainer.schedule.get_last_lr()[0])
    return loss, trainer.schedule.get_last_lr(), trainer.schedule.last_epoch


def calls_after_it_reads(trainer: Scheduled, x: Tensor, logs: dict[str, Any]) -> Any:
    logs["rates"].append(trainer.schedule.get_last_lr()[0])
    loss = trainer.step(x)
    trainer.schedule.step()
    logs["last"] = trainer.schedule.get_last_lr()[0]
    return loss


def calls_with_an_epoch(trainer: Scheduled, x: Tensor, _: dict[str, Any]) -> Any:
    loss = trainer.step(x)
    trainer.schedule.step(trainer.schedule.last_epoch + 1.5)
    return loss


def calls_twice(trainer: Scheduled, x: Tensor, _: dict[str, Any]) -> Any:
    loss = trainer.step(x)
    if trainer.schedule.last_epoch < 2:
        trainer.schedule.step()
    return loss


def keeps_the_state_of_it(trainer: Scheduled, x: Tensor, logs: dict[str, Any]) -> Any:
    logs["rates"].append(trainer.schedule.state_dict())
    return trainer.step(x)


def reports_the_rate(trainer: Scheduled, x: Tensor, _: dict[str, Any]) -> Any:
    loss = trainer.step(x)
    trainer.schedule.step()
    return loss, [group["lr"] for group in trainer.optimizer.param_groups]


@step()
def reads_a_schedule_that_is_called_outside() -> Training:
    return reading(hands_on, outside=True)


@step()
def reads_a_chain_that_is_called_outside() -> Training:
    return reading(
        hands_on,
        lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 1)], [1]),
        outside=True,
    )


@step()
def reads_a_schedule_before_it_is_called() -> Training:
    return reading(calls_after_it_reads)


@step()
def gives_a_schedule_its_own_epoch() -> Training:
    return reading(calls_with_an_epoch, lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3))


@step()
def calls_a_schedule_for_two_steps() -> Training:
    return reading(calls_twice)


@step()
def keeps_states_of_a_schedule() -> Training:
    return reading(keeps_the_state_of_it, outside=True)


@step()
def reports_the_rates_of_groups_that_are_loaded() -> Training:
    return reading(reports_the_rate, loaded=True)
