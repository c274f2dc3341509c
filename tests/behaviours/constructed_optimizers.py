"""Training steps with optimizers that keep more than tensors by parameter, or stand around others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import whence
from tests.behaviours.constructed_steps import STEPS, Training, gradient_of, loss_of, network, step
from tests.behaviours.constructions import Refusal

__all__ = ["STEPS"]

Update = Callable[[Any, Tensor, dict[str, Any]], Tensor]
"""What an optimizer adds to a parameter, of its state."""


class Keeping(Optimizer):
    """Descends by what a function makes of the gradient and of what is kept."""

    def __init__(self, model: nn.Module, update: Update) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            updates = [(held, self.update(self, held, self.state[held])) for held in group["params"]]
            for held, update in updates:
                held.sub_(update, alpha=group["lr"])


def training(make: Callable[[nn.Module], Optimizer], *, create_graph: bool = False) -> Training:
    """A network with an optimizer."""
    model = network()
    optimizer = make(model)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward(create_graph=create_graph)
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


@step()
def momenta_in_a_dict() -> Training:
    def update(_: Any, held: Tensor, state: dict[str, Any]) -> Tensor:
        momenta = state.setdefault("momenta", {beta: torch.zeros_like(held) for beta in (0.0, 0.9)})
        return torch.stack([m.mul_(beta).add_(gradient_of(held)) for beta, m in momenta.items()]).mean(0)

    return training(lambda model: Keeping(model, update))


@step()
def factors_in_lists() -> Training:
    """With constants beside them, and new tensors in the places of the old."""

    def update(_: Any, held: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["sides"] = [torch.zeros(size) for size in held.shape]
            state["kind"], state["is_matrix"] = "sides", held.dim() > 1
        for at, side in enumerate(state["sides"]):
            rest = [dim for dim in range(held.dim()) if dim != at]
            squares = gradient_of(held).square()
            state["sides"][at] = side * 0.9 + (squares.sum(rest) if rest else squares)
        scale = state["sides"][0].unsqueeze(-1) if state["is_matrix"] else state["sides"][0]
        return gradient_of(held) / (scale.sqrt() + 1)

    return training(lambda model: Keeping(model, update))


@step(warm=True)
def gradients_in_a_queue() -> Training:
    """As long as it is full from the beginning."""

    def update(_: Any, held: Tensor, state: dict[str, Any]) -> Tensor:
        queue = state.setdefault("queue", deque([torch.zeros_like(held)] * 0, maxlen=1))
        queue.append(gradient_of(held).clone())
        return torch.stack([*queue]).mean(0)

    return training(lambda model: Keeping(model, update))


class Choosing(Optimizer):
    """Has a class in its groups, and keeps one and a set for each parameter, as heavyball's do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "kind": Projector, "names": {"average"}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for held in group["params"]:
                state = self.state[held]
                if not state:
                    state["begun"], state["kind"] = {0}, group["kind"]
                    state |= {name: torch.zeros_like(held) for name in group["names"]}
                average = state["average"].lerp_(held.grad, 0.5)
                held.sub_(average if 0 in state["begun"] else held.grad, alpha=group["lr"])


@step()
def classes_and_sets() -> Training:
    return training(lambda model: Choosing(model.parameters()))


@step(warm=True)
def classes_and_sets_that_are_there() -> Training:
    return training(lambda model: Choosing(model.parameters()))


class Filtering(Optimizer):
    """Has a function in its groups, which says what is decayed, as LARS of VICReg and Barlow Twins."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "decays": is_a_matrix})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for held in group["params"]:
                change = held.grad + 0.1 * held if group["decays"](held) else held.grad
                held.sub_(change, alpha=group["lr"])


def is_a_matrix(held: Tensor) -> bool:
    return held.ndim > 1


@step()
def a_function_in_the_groups() -> Training:
    return training(lambda model: Filtering(model.parameters()))


class Numbering(Optimizer):
    """Keeps state under numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for held in self.param_groups[0]["params"]:
            state = self.state[held]
            if 0 not in state:
                state[0] = torch.zeros_like(held)
            held.sub_(state[0].lerp_(held.grad, 0.5), alpha=self.param_groups[0]["lr"])


@step()
def state_under_numbers() -> Training:
    return training(lambda model: Numbering(model.parameters()))


class Touching(Optimizer):
    """Looks for the state of each parameter, which makes one, and keeps none."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for held in self.param_groups[0]["params"]:
            if held.grad is not None:
                state = self.state[held]
                held.sub_(held.grad + state.get("average", 0.0), alpha=self.param_groups[0]["lr"])


@step()
def looks_for_state() -> Training:
    return training(lambda model: Touching(model.parameters()))


@step()
def asks_whether_state_was_looked_for() -> Training:
    return _asking(lambda optimizer, _: len(optimizer.state), Touching)


class Projector:
    """Holds a direction, how often it was made, and how."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.made = 0
        self.direction: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        return str(vars(self)) == str(vars(other))

    __hash__ = None  # type: ignore[assignment]

    def project(self, gradient: Tensor) -> Tensor:
        self.made += 1
        self.direction = gradient / (gradient.norm() + self.made)
        return self.direction


@step()
def projectors_in_the_state() -> Training:
    def update(_: Any, held: Tensor, state: dict[str, Any]) -> Tensor:
        projector: Projector = state.setdefault("projector", Projector("norm"))
        return projector.project(gradient_of(held))

    return training(lambda model: Keeping(model, update))


@step()
def state_of_the_whole() -> Training:
    """Under a key of its own: a tensor, and numbers in a dictionary."""

    def update(optimizer: Any, held: Tensor, _: dict[str, Any]) -> Tensor:
        state = optimizer.state
        if "taken" not in state:
            state["taken"], state["mean"] = torch.tensor([0]), {"short": 0.0}
        state["taken"].add_(1)
        state["mean"]["short"] = state["mean"]["short"] * 0.5 + gradient_of(held).norm().item()
        return gradient_of(held) * (1 / (1 + state["mean"]["short"])) / state["taken"]

    return training(lambda model: Keeping(model, update))


@step()
def weights_of_which_there_are_none_yet() -> Training:
    """A division that Python refuses, as it does in the first steps of schedule-free ones that warm up."""

    def update(_: Any, held: Tensor, state: dict[str, Any]) -> Tensor:
        weight = state.get("weights", 0.0) * 0.5
        total = state["weights"] = state.get("weights", 0.0) + weight
        try:
            share = weight / total
        except ZeroDivisionError:
            share = 0.25
        return gradient_of(held) * share

    return training(lambda model: Keeping(model, update))


@step()
def state_in_attributes() -> Training:
    """By the identity of parameters, as those do that stand around any optimizer."""

    def update(optimizer: Any, held: Tensor, _: dict[str, Any]) -> Tensor:
        momentum = optimizer.__dict__.setdefault("momenta", {}).setdefault(id(held), torch.zeros_like(held))
        optimizer.taken = optimizer.__dict__.get("taken", 0) + 1
        return momentum.lerp_(gradient_of(held), 0.1) / optimizer.taken

    return training(lambda model: Keeping(model, update))


@step()
def begins_anew() -> Training:
    """Momentum is the first gradient once more."""
    made = training(lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9))
    taken = count(1)

    def clear_once() -> None:
        if next(taken) == 2:
            made.optimizer.state.clear()

    return replace(made, between=clear_once, batches=made.batches * 2)


class Lookahead(Optimizer):
    """Goes back half the way after some steps of another optimizer, which has the same groups."""

    def __init__(self, inner: Optimizer, every: int = 2) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.every = inner, every
        self.param_groups = inner.param_groups
        for group in self.param_groups:
            group["taken"] = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            group["taken"] += 1
            for held in group["params"]:
                slow = self.state[held].setdefault("slow", held.detach().clone())
                if group["taken"] >= self.every:
                    held.copy_(slow.lerp_(held, 0.5))
            if group["taken"] >= self.every:
                group["taken"] = 0


@step()
def looks_ahead() -> Training:
    """A number that steps advance, and set back to a constant."""
    return training(lambda model: Lookahead(AdamW(model.parameters())))


@step()
def looks_ahead_of_momentum() -> Training:
    return training(lambda model: Lookahead(SGD(model.parameters(), lr=0.1, momentum=0.9)))


@step()
def curvature_of_the_loss() -> Training:
    """Differentiates the gradients once more, in the optimizer, along a direction that it draws."""

    def update(_: Any, held: Tensor, state: dict[str, Any]) -> Tensor:
        drawn = torch.randint(0, 2, held.shape) * 2.0 - 1
        with torch.enable_grad():
            (curved,) = torch.autograd.grad(gradient_of(held), held, drawn, retain_graph=True)
        curvature = state.setdefault("curvature", torch.zeros_like(held))
        curvature.lerp_((curved * drawn).abs(), 0.1)
        return gradient_of(held).detach() / (curvature + 1)

    return training(lambda model: Keeping(model, update), create_graph=True)


@step()
def graph_that_nobody_needs() -> Training:
    return training(lambda model: Adam(model.parameters()), create_graph=True)


def gradients_of_before(use: Callable[[nn.Module, Optimizer], None]) -> Training:
    """A step that meets the gradients that the one before has left."""
    model = network()
    optimizer = Adam(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        use(model, optimizer)
        return loss.detach()

    return Training(model, optimizer, step)


class Accumulating:
    """Steps after every other batch."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.seen += 1
        if self.seen % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


@step()
def accumulates_over_batches() -> Training:
    """Which batch it is decides: a program for each way that the step goes."""
    return gradients_of_before(Accumulating())


@step()
def zeroes_after_the_step() -> Training:
    def use(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return gradients_of_before(use)


@step()
def heavy_ball_of_gradients() -> Training:
    """What is left of a gradient is part of the next one."""

    def use(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step()
        for held in model.parameters():
            gradient_of(held).mul_(0.9)

    return gradients_of_before(use)


@step()
def updates_late() -> Training:
    """With the gradients of the batch before."""
    model = network()
    optimizer = Adam(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss.detach()

    return Training(model, optimizer, step)


@step()
def compares_with_the_gradient_before() -> Training:
    def use(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step()
        for held in model.parameters():
            held.grad = gradient_of(held) / (1 + gradient_of(held).norm())

    return gradients_of_before(use)


@step()
def freezes_a_layer_with_a_gradient() -> Training:
    """One parameter keeps the gradient that it got, and others go on."""

    def use(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step()
        model[0].zero_grad()  # type: ignore[index]

    return gradients_of_before(use)


def beside(model: nn.Module, use: Callable[[Tensor, Tensor], Tensor]) -> Training:
    """A step that has tensors of its own beside the model's."""
    optimizer = Adam(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        loss = loss_of(out) + use(x, out)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


@step()
def carries_a_hidden_state() -> Training:
    """What the step before has left in a dictionary, cut off from its history."""
    cell, held = nn.LSTMCell(4, 2), {"state": (torch.zeros(5, 2), torch.zeros(5, 2))}

    def use(x: Tensor, _: Tensor) -> Tensor:
        hidden, memory = cell(x, held["state"])
        held["state"] = hidden.detach(), memory.detach()
        return hidden.square().mean()

    made = beside(network(), use)
    made.model = nn.ModuleList([made.model, cell])
    return replace(made, kept=lambda: held["state"])


@step()
def begins_a_hidden_state() -> Training:
    """Which is None in the first step."""
    held: dict[str, Any] = {"mean": None}

    def use(_: Tensor, out: Tensor) -> Tensor:
        mean = out.detach().mean(0) if held["mean"] is None else held["mean"] * 0.9 + out.detach().mean(0)
        held["mean"] = mean
        return (out - mean).square().mean()

    return replace(beside(network(), use), kept=lambda: held["mean"])


class Averages:
    """Averages of parameters by name."""

    def __init__(self, model: nn.Module, *, in_place: bool) -> None:
        self.held = {name: held.detach().clone() for name, held in model.named_parameters()}
        self.in_place = in_place

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, held in model.named_parameters():
            if self.in_place:
                self.held[name].lerp_(held, 0.1)
            else:
                self.held[name] = 0.9 * self.held[name] + 0.1 * held


def averaged(*, in_place: bool) -> Training:
    model = network()
    averages = Averages(model, in_place=in_place)

    def use(_: Tensor, out: Tensor) -> Tensor:
        averages.update(model)
        return out.sum() * 0

    return replace(beside(model, use), kept=lambda: averages.held)


@step()
def averages_by_name() -> Training:
    return averaged(in_place=False)


@step()
def averages_by_name_in_place() -> Training:
    return averaged(in_place=True)


@step()
def counts_in_a_matrix() -> Training:
    matrix = torch.zeros(2, 2)

    def use(x: Tensor, out: Tensor) -> Tensor:
        wanted = (x.sum(1) > 0).long()
        matrix.index_put_((wanted, out.argmax(1)), torch.ones(5), accumulate=True)
        return out.sum() * 0

    return replace(beside(network(), use), kept=lambda: matrix)


@step()
def descends_with_momentum_by_hand() -> Training:
    model = network()
    momenta = [torch.zeros_like(held) for held in model.parameters()]

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for held, momentum, gradient in zip(model.parameters(), momenta, gradients, strict=True):
                held.sub_(momentum.mul_(0.9).add_(gradient), alpha=0.1)
        return loss.detach()

    return Training(model, None, step, kept=lambda: momenta)


ALIASED = Refusal(whence.UnsupportedMutation, "shares its memory with", "a program has two values")
SHARED = Refusal(whence.UnsupportedStep, r"one tensor is the \.grad", "the next step adds to both")


@step(refused=ALIASED)
def writes_to_a_view_of_a_parameter() -> Training:
    model: Any = network()
    view = model[0].weight.detach()

    def use(_: Tensor, out: Tensor) -> Tensor:
        view.mul_(0.9)
        return out.sum() * 0

    return beside(model, use)


@step(refused=ALIASED)
def writes_to_views_of_one_tensor() -> Training:
    whole = torch.zeros(2, 4)
    first, second = whole.unbind()

    def use(x: Tensor, out: Tensor) -> Tensor:
        first.add_(x.mean(0))
        second.sub_(first)
        return (out * whole.sum()).mean()

    return beside(network(), use)


@step(refused=SHARED)
def one_gradient_for_two() -> Training:
    model: Any = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model[0](x) + model[1](x))
        loss.backward()
        model[1].weight.grad = model[0].weight.grad
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def _asking(ask: Callable[[Optimizer, Tensor], Any], kind: Callable[[Any], Optimizer] = Adam) -> Training:
    """Asks what the optimizer has before it steps."""
    model = network()
    optimizer = kind(model.parameters())

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        found = ask(optimizer, loss)
        (found if isinstance(found, Tensor) else loss).backward()
        optimizer.step()
        return (loss.detach(), found) if type(found) in (int, bool, str) else loss.detach()

    return Training(model, optimizer, step)


def _set_rate(optimizer: Optimizer, _: Tensor) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 if optimizer.state else 0.5


ASKED: dict[str, Callable[[Optimizer, Tensor], Any]] = {
    "scales_the_loss_before_there_is_state": lambda held, loss: loss if len(held.state) else loss * 3,
    "scales_the_loss_by_another_number": lambda held, loss: loss * (5.0 if held.state else 3.0),
    "returns_how_much_state_there_is": lambda held, _: len(held.state),
    "returns_whether_there_is_state": lambda held, _: bool(held.state),
    "returns_a_text_about_state": lambda held, _: "warm" if held.state else "cold",
    "another_rate_before_there_is_state": _set_rate,
}


def _add(name: str, ask: Callable[[Optimizer, Tensor], Any]) -> None:
    def build() -> Training:
        return _asking(ask)

    build.__name__ = name
    step()(build)


for _name, _ask in ASKED.items():
    _add(_name, _ask)
