"""Training steps in the styles of trainers that many people use."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.behaviours.constructed_steps import STEPS, Training, gradient_of, loss_of, network, plain, step
from tests.tracing.steps.small import Delegating

__all__ = ["STEPS"]


class Gate(nn.Module):
    """An activation of several operations."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


class Block(nn.Module):
    """A layer of which a model has several."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.LayerNorm(4), nn.Linear(4, 8), Gate(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.gate(self.up(self.norm(x))))


@step()
def microbatches_of_equal_layers() -> Training:
    """What was recorded of a layer before the first backward cannot be rehearsed after it."""
    model = nn.Sequential(Block(), Gate(), Block(), Gate(), Gate())
    optimizer = AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor) -> float:
        for _ in range(3):
            loss = loss_of(model(x)) / 3
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item() * 2

    return Training(model, optimizer, step)


class Trainer:
    """Keeps where it is in a namespace of its own."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = AdamW(self.model.parameters())
        self.state = SimpleNamespace(global_step=0, epoch=0.0)
        self.total = torch.tensor(0.0)

    def step(self, x: Tensor) -> Tensor:
        loss = plain(self.model, self.optimizer)(x)
        self.total = self.total + loss.detach()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / 10
        return self.total.clone()


@step()
def counts_in_a_namespace_of_a_trainer() -> Training:
    trainer = Trainer()
    held = (trainer.model, trainer.optimizer, trainer.step)
    return Training(*held, kept=lambda: (vars(trainer.state), trainer.total))


@step()
def normalises_the_weights_of_a_critic() -> Training:
    """What the norm leaves as an attribute lies in the weight's memory until the first call."""
    critic: Any = nn.utils.spectral_norm(nn.Linear(4, 1))
    models = nn.ModuleDict({"maker": nn.Linear(4, 4), "critic": critic})
    first, second = Adam(models["maker"].parameters()), Adam(critic.parameters())

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        made = models["maker"](torch.randn_like(x))
        second.zero_grad()
        judged = F.relu(1 - critic(x)).mean() + F.relu(1 + critic(made.detach())).mean()
        judged.backward()
        second.step()
        first.zero_grad()
        fooled = -critic(made).mean()
        fooled.backward()
        first.step()
        return judged.detach(), fooled.detach()

    return Training(models, [first, second], step)


@step()
def steps_a_tied_weight_in_the_backward() -> Training:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, Block(), head)
    optimizers = {held: SGD([held], lr=0.1) for held in model.parameters()}

    def hook(held: Tensor) -> None:
        optimizers[held].step()  # type: ignore[index]
        held.grad = None

    for held in model.parameters():
        held.register_post_accumulate_grad_hook(hook)

    def step(x: Tensor) -> Tensor:
        ids = x.abs().long().clamp(max=4)
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        return loss

    return Training(model, [*optimizers.values()], step)


def with_gradients(finish: Callable[[nn.Module], object], *, flat: bool = False) -> Training:
    """A step that zeroes gradients which others hold, too: in one buffer, or each by itself."""
    model = network()
    buffer = torch.zeros(sum(held.numel() for held in model.parameters()))
    sizes = [held.numel() for held in model.parameters()]
    for held, part in zip(model.parameters(), buffer.split(sizes), strict=True):
        held.grad = part.view_as(held) if flat else torch.zeros_like(held)
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = [held.grad for held in model.parameters()]

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model(x))
        loss.backward()
        finish(model)
        optimizer.step()
        return loss

    return Training(model, optimizer, step, kept=lambda: (seen, buffer))


@step()
def gradients_in_one_buffer() -> Training:
    return with_gradients(lambda _: None, flat=True)


@step()
def gradients_that_others_hold() -> Training:
    return with_gradients(lambda _: None)


@step()
def gradients_that_others_held() -> Training:
    def finish(model: nn.Module) -> None:
        for held in model.parameters():
            held.grad = gradient_of(held) * 2

    return with_gradients(finish)


def by_vector(move: Callable[[Tensor, Tensor], Tensor]) -> Training:
    """A step that puts all weights back as views of one vector."""
    model = network()

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        vector = nn.utils.parameters_to_vector(model.parameters())
        moved = move(vector, nn.utils.parameters_to_vector(gradients))
        nn.utils.vector_to_parameters(moved, model.parameters())
        return loss

    return Training(model, None, step)


@step()
def weights_from_a_vector() -> Training:
    return by_vector(lambda vector, gradient: vector - 0.1 * gradient)


@step(warm=True)
def weights_in_a_vector() -> Training:
    return by_vector(lambda vector, gradient: vector - 0.1 * gradient / gradient.norm())


@step()
def weights_shrunk_in_a_vector() -> Training:
    model = network()
    optimizer = AdamW(model.parameters())
    run = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = run(x)
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
        return loss

    return Training(model, optimizer, step)


@step()
def gradients_by_functions() -> Training:
    """Private gradients: those of each row, clipped, with noise; no backward runs."""
    model = network()
    optimizer = AdamW(model.parameters())

    def loss_of_row(held: dict[str, Tensor], row: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, held, (row[None],)))

    def step(x: Tensor) -> Tensor:
        held = {name: parameter.detach() for name, parameter in model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss_of_row), (None, 0))(held, x)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in found.values()]).norm(dim=0)
        scales = (0.1 / norms).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            mean = torch.einsum("n,n...->...", scales, found[name]) / len(x)
            parameter.grad = mean + 0.01 * torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return norms.mean()

    return Training(model, optimizer, step)


@step()
def gradients_by_evolution() -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def step(x: Tensor) -> Tensor:
        before = [held.clone() for held in model.parameters()]
        moves = [torch.randn_like(held) for held in model.parameters()]
        for held, move in zip(model.parameters(), moves, strict=True):
            held.add_(move, alpha=0.01)
        loss = loss_of(model(x))
        for held, was, move in zip(model.parameters(), before, moves, strict=True):
            held.copy_(was)
            held.grad = (loss - loss_of(model(x))) / 0.01 * move
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model, optimizer, step)


@step()
def adam_of_a_dictionary_by_parameters() -> Training:
    """Written by hand, in hooks: all that it keeps is under the parameters themselves."""
    model = network()
    state: dict[Any, Any] = {
        held: {"mean": torch.zeros_like(held), "square": torch.zeros_like(held), "taken": 0}
        for held in model.parameters()
    }

    def hook(held: Tensor) -> None:
        kept = state[held]
        kept["taken"] += 1
        kept["mean"].lerp_(gradient_of(held), 0.1)
        kept["square"].mul_(0.99).addcmul_(gradient_of(held), gradient_of(held), value=0.01)
        mean = kept["mean"] / (1 - 0.9 ** kept["taken"])
        held.data.addcdiv_(mean, kept["square"].sqrt() + 1e-8, value=-0.01)
        held.grad = None

    for held in model.parameters():
        held.register_post_accumulate_grad_hook(hook)

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        return loss

    return Training(model, None, step, kept=lambda: [*state.values()])


class Smoothed:
    """A value as trainers of images keep it."""

    def __init__(self) -> None:
        self.recent, self.total, self.count = deque[float](maxlen=2), 0.0, 0

    def update(self, value: float) -> None:
        self.recent.append(value)
        self.total += value
        self.count += 1


@step()
def meters_that_the_first_step_makes() -> Training:
    model, meters = network(), defaultdict[str, Smoothed](Smoothed)
    optimizer = SGD(model.parameters(), lr=0.1)
    run = plain(model, optimizer)

    def step(x: Tensor) -> float:
        meters["loss"].update(run(x).item())
        return meters["loss"].total / meters["loss"].count

    return Training(model, optimizer, step, kept=lambda: {name: vars(held) for name, held in meters.items()})


class Counted(Delegating):
    """Has all from the optimizer inside, and does nothing of its own but to count."""

    def __init__(self, inside: Optimizer) -> None:
        super().__init__(inside)
        self.calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inside.zero_grad(set_to_none)

    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        self.inside.step()

    def state_dict(self) -> Any:
        return self.inside.state_dict()


class Sharing:
    """Takes over the attributes of the optimizer, and is of a class made of its class."""

    def __init__(self, inside: Optimizer) -> None:
        vars(self).update({name: held for name, held in vars(inside).items() if name != "step"})
        self.__class__ = type("Sharing", (Sharing, type(inside)), {})
        self.inside = inside

    def step(self) -> None:
        self.inside.step()


class Warming:
    """No optimizer, but around one, whose rate it sets in every step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.taken = optimizer, 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self) -> None:
        self.taken += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(self.taken**-0.5, self.taken * 0.2)
        self.optimizer.step()


class Damped(Optimizer):
    """Stands for another, with hooks of its own around its steps, as every optimizer has them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()
        self.optimizer, self.taken = optimizer, 0
        self.past: list[int] = []

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        self.past.append(self.taken)
        for tensor in (each for group in self.param_groups for each in group["params"]):
            tensor.grad.mul_(1 / self.taken)
        return self.optimizer.step(closure)


class Ascending(Optimizer):
    """Is set up as an optimizer, and has the groups and the state of the one that it holds."""

    def __init__(self, inside: Optimizer) -> None:
        super().__init__(inside.param_groups, {"rho": 0.05})
        self.inside = inside
        self.param_groups, self.state = inside.param_groups, inside.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        before = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.add_(tensor.grad, alpha=0.05)
        for tensor, then in zip(tensors, before, strict=True):
            tensor.copy_(then)
        self.inside.step(closure)


def around(kind: Callable[[Optimizer], Any]) -> Callable[[], Training]:
    """A step with an optimizer that stands for another, which nobody passes by itself."""

    def build() -> Training:
        model = network()
        wrapper = kind(AdamW(model.parameters()))
        return Training(model, wrapper, plain(model, wrapper))

    build.__name__ = f"{kind.__name__.lower()}_optimizer"
    return build


for kind in (Counted, Sharing, Warming, Damped, Ascending):
    step()(around(kind))
