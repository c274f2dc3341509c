"""Canaries: where a training step can be watched."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, SequentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.tracing.steps.small import Delegating
from whence._torch.observe.training_steps import (
    as_one_optimizer,
    common_state,
    is_stepping,
    moved_by,
    note_step,
    observed_step,
    optimizer_hooks,
    own_values,
    parameters_of,
    schedules_in,
)


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.reported = set[int]()
        self.told: list[Any] = []

    @contextmanager
    def backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], *, creates_graph: bool, fills: bool
    ) -> Iterator[bool]:
        self.told.append(("backward", len(roots), creates_graph, fills))
        yield True

    def node_starts(self, node: Node, received: Sequence[Tensor | None]) -> None:
        self.told.append(node.name())

    def node_ends(self, node: Node, produced: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        self.told.append(len(produced))
        return produced

    def gradient_arrives(self, leaf: Tensor) -> None:
        self.told.append(leaf.grad)

    def gradient_is_kept(self, leaf: Tensor) -> None:
        self.told.append(leaf.grad)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        self.told.append("hooked")
        yield

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        self.told.append(type(optimizer))
        yield
        self.told.append("stepped")

    @contextmanager
    def closing(self) -> Iterator[None]:
        self.told.append("closing")
        yield
        self.told.append("closed")

    def scheduling(self, schedule: LRScheduler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.told.append("scheduled")

    def gradients_cleared(self, parameters: Sequence[Tensor]) -> None:
        self.told.append(len(parameters))

    def gradients_zeroed(self, parameters: Sequence[Tensor]) -> None:
        self.told.append(-len(parameters))


def test_backward_is_told_node_by_node() -> None:
    """Every node that fills `.grad` is told of, before and after; `torch.autograd.grad` fills none."""
    listener, leaf = Listener(), nn.Parameter(torch.ones(2))
    with observed_step(listener):
        leaf.sum().backward()
        torch.autograd.grad(leaf.sum(), leaf)
    _, name, _, before, after, second, *_ = listener.told
    assert listener.told[0] == ("backward", 1, False, True)
    assert name == "SumBackward0"
    assert before is None
    assert after is leaf.grad
    assert second == ("backward", 1, False, False)


def test_optimizer_is_told_of() -> None:
    """A step is seen with its closure, `zero_grad` with its parameters, of optimizers and of modules."""
    listener, model = Listener(), nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    assert not is_stepping()
    with observed_step(listener):
        optimizer.step()
        optimizer.step(lambda: float(is_stepping()))
        optimizer.zero_grad()
        model.zero_grad(set_to_none=False)
        model.zero_grad()
    assert listener.told == [SGD, "stepped", SGD, "closing", "closed", "stepped", 2, -2, 2]
    assert optimizer.step(lambda: float(is_stepping())) == 1.0
    assert len(parameters_of(optimizer)) == len(parameters_of(model)) == 2


@pytest.mark.canary("torch.autograd._engine_run_backward", "torch.optim.Optimizer.profile_hook_step.args")
def test_nothing_stays_patched() -> None:
    """After the block torch is as it was, also after an error."""
    held = (torch.autograd._engine_run_backward, torch.autograd.profiler.record_function)
    cleared = (vars(Optimizer)["zero_grad"], vars(nn.Module)["zero_grad"])
    with pytest.raises(KeyError), observed_step(Listener()):
        raise KeyError
    assert held == (torch.autograd._engine_run_backward, torch.autograd.profiler.record_function)
    assert cleared == (vars(Optimizer)["zero_grad"], vars(nn.Module)["zero_grad"])


@pytest.mark.parametrize("by_name", [False, True])
def test_closures_are_told_of(by_name: bool) -> None:
    """An optimizer calls the closure inside its step; the hook that tells is gone afterwards."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = SGD([parameter], lr=0.1)

    def closure() -> float:
        parameter.grad = torch.ones(1)
        return 2.0

    listener = Listener()
    with observed_step(listener):
        found = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert found == 2.0
    assert listener.told == [SGD, "closing", "closed", "stepped"]
    assert optimizer_hooks(optimizer) == []


@pytest.mark.canary(
    "torch.optim.Optimizer._optimizer_step_post_hooks",
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.optim.optimizer._global_optimizer_pre_hooks",
)
def test_hooks_of_optimizers_are_found() -> None:
    """Its own before and after a step (`_optimizer_step_pre_hooks`), and those for all optimizers
    (`_global_optimizer_pre_hooks`, `_global_optimizer_post_hooks`)."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    handles = [
        optimizer.register_step_pre_hook(lambda *_: None),
        optimizer.register_step_post_hook(lambda *_: None),
        register_optimizer_step_pre_hook(lambda *_: None),
        register_optimizer_step_post_hook(lambda *_: None),
    ]
    assert len(optimizer_hooks(optimizer)) == len(handles)
    for handle in handles:
        handle.remove()
    assert optimizer_hooks(optimizer) == []


@pytest.mark.canary(
    "torch.optim.lr_scheduler.LRScheduler._opt_called",
    "torch.optim.lr_scheduler.LRScheduler._wrapped_by_lr_sched",
)
def test_schedules_ask_for_steps() -> None:
    """A schedule warns unless the optimizer has stepped (`_wrapped_by_lr_sched`, `_opt_called`)."""
    first, second = (SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        ExponentialLR(first, 0.9).step()
    schedule = ExponentialLR(second, 0.9)
    note_step(second)
    schedule.step()
    note_step(SGD([nn.Parameter(torch.ones(1))], lr=0.1))


@pytest.mark.canary(
    "torch.optim.lr_scheduler.LRScheduler._last_lr", "torch.optim.lr_scheduler.SequentialLR._schedulers"
)
def test_schedules_hold_schedules_and_numbers() -> None:
    """Those that others are made of (`_schedulers`), and what `get_last_lr` gives (`_last_lr`)."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    inner: list[LRScheduler] = [ExponentialLR(optimizer, 0.9), ExponentialLR(optimizer, 0.5)]
    schedule = SequentialLR(optimizer, inner, [2])
    assert list(schedules_in(schedule)) == [schedule, *inner]
    assert {"last_epoch", "_last_lr"} <= set(moved_by(schedule))
    assert "optimizer" not in moved_by(schedule)


@pytest.mark.canary(
    "torch.optim.SGD._need_device_dtype_check_for_fused",
    "torch.optim.Optimizer._warned_capturable_if_run_uncaptured",
    "torch.optim.Optimizer._zero_grad_profile_name",
)
@pytest.mark.parametrize("fused", [False, True])
def test_pytorch_s_own_attributes_are_left_out(fused: bool) -> None:
    """What is in every optimizer (`_warned_capturable_if_run_uncaptured`, `_zero_grad_profile_name`), and
    what fused ones note (`_need_device_dtype_check_for_fused`); what is an optimizer's own is found."""
    model = nn.Linear(2, 2)
    optimizer: Any = SGD(model.parameters(), fused=fused)
    ExponentialLR(optimizer, 0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert set(own_values(optimizer)) <= {"_step_supports_amp_scaling"}
    optimizer.scale, optimizer.state["taken"] = 2.0, 1
    assert own_values(optimizer)["scale"] == 2.0
    assert dict(common_state(optimizer)) == {"taken": 1}


class OfItsOwn(Delegating):
    """Stands for another, but for its state."""

    state: Any = {}  # noqa: RUF012


def test_an_optimizer_that_stands_for_another_is_seen_through() -> None:
    """Also one of one, and where the one inside knows it; not one with a state of its own."""
    inside: Any = SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    once: Any = Delegating(inside)
    assert as_one_optimizer(once) is inside
    assert as_one_optimizer([Delegating(once)]) is inside
    vars(inside)["known_as"] = once
    assert as_one_optimizer(once) is inside
    assert as_one_optimizer(inside) is inside
    own = OfItsOwn(inside)
    assert as_one_optimizer(own) is own
    once.outer = Delegating(once)
    assert as_one_optimizer(inside) is inside
    assert as_one_optimizer(torch.nn.Linear(1, 1)) is not inside
