"""Training steps that go several ways, where one changes what another finds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import whence
from tests.behaviours.constructed_steps import STEPS, Training, gradient_of, loss_of, network, plain, step
from tests.behaviours.constructions import Refusal, numbers

__all__ = ["STEPS"]

Run = Callable[[Tensor], Tensor]
Go = Callable[[Any, Tensor, Run], Any]


def several(go: Go, *, scales: tuple[float, ...] = (1.0, 0.5, 1.5) * 3, **held: Any) -> Training:
    """A step that goes the way which what is `held` says."""
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.1)
    run, kept = plain(model, optimizer), SimpleNamespace(**held, model=model)

    def kept_now() -> dict[str, Any]:
        return {name: value for name, value in vars(kept).items() if name != "model"}

    batches = tuple((numbers(5, 4) * scale,) for scale in scales)
    return Training(model, optimizer, lambda x: go(kept, x, run), kept=kept_now, batches=batches)


@step()
def logs_every_other_step() -> Training:
    def go(kept: Any, x: Tensor, run: Run) -> Tensor:
        loss = run(x)
        kept.step += 1
        if kept.step % 2 == 0:
            kept.log.append(loss.item())
            kept.tables["losses"].append((kept.step, loss.detach()))
        return loss

    return several(go, step=0, log=[], tables={"losses": []})


@step()
def remembers_every_third_step() -> Training:
    def go(kept: Any, x: Tensor, run: Run) -> Tensor:
        loss = run(x)
        kept.step += 1
        if kept.step % 3 == 0:
            kept.last = loss.detach().clone()
            kept.total += loss.item()
            kept.best = {"weight": kept.model[0].weight.detach().clone()}
        return loss

    return several(go, step=0, last=None, total=0.0, best={})


@step()
def averages_over_four_steps() -> Training:
    def go(kept: Any, x: Tensor, run: Run) -> None:
        kept.running += run(x).item()
        kept.step += 1
        if kept.step % 4 == 0:
            kept.log.append((kept.step, kept.running / 4))
            kept.running = 0.0

    return several(go, step=0, running=0.0, log=[])


@step()
def lessens_what_all_steps_read() -> Training:
    def go(kept: Any, x: Tensor, run: Run) -> Tensor:
        loss = run(x * kept.scale + kept.shift)
        kept.step += 1
        if kept.step % 2 == 0:
            kept.scale *= 0.5
            kept.shift = kept.shift * 0.5 + 1
        return loss

    return several(go, step=0, scale=1.0, shift=torch.ones(4))


@step()
def grows_with_its_count() -> Training:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2)
            self.depth = 1

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[: self.depth]:
                x = layer(x).relu()
            return self.head(x)

    model, kept = Deep(), SimpleNamespace(step=0)
    optimizer = SGD(model.parameters(), lr=0.1)
    run = plain(model, optimizer)

    def go(x: Tensor) -> Tensor:
        kept.step += 1
        if kept.step % 2 == 0 and model.depth < 3:
            model.depth += 1
        return run(x)

    batches = tuple((numbers(5, 4),) for _ in range(6))
    return Training(model, optimizer, go, kept=lambda: (vars(kept), model.depth), batches=batches)


NAN = float("nan")


@step(decide="example")
def skips_what_is_no_number() -> Training:
    """A way without a backward, and a count that only it changes."""

    def go(kept: Any, x: Tensor, run: Run) -> Any:
        if torch.isnan(x).any():
            kept.skipped += 1
            return None
        return run(x).item()

    return several(go, scales=(1.0, NAN, 0.5, NAN, 2.0), skipped=0)


def scaled_by_hand() -> tuple[nn.Module, Optimizer, SimpleNamespace]:
    model = network()
    return model, SGD(model.parameters(), lr=0.1), SimpleNamespace(scale=16.0, good=0)


@step(decide="example")
def scales_the_loss_by_hand() -> Training:
    model, optimizer, kept = scaled_by_hand()

    def go(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        (loss * kept.scale).backward()
        if not all(gradient_of(held).isfinite().all() for held in model.parameters()):
            kept.scale, kept.good = kept.scale / 2, 0
            return loss
        for held in model.parameters():
            gradient_of(held).div_(kept.scale)
        optimizer.step()
        kept.good += 1
        if kept.good == 2:
            kept.scale, kept.good = kept.scale * 2, 0
        return loss

    batches = tuple((numbers(5, 4) * scale,) for scale in (1.0, 2.0, NAN, 1.5, 0.5, NAN, 1.0))
    return Training(model, optimizer, go, kept=lambda: vars(kept), batches=batches)


@step(decide="example")
def keeps_the_best_weights() -> Training:
    def go(kept: Any, x: Tensor, run: Run) -> Tensor:
        loss = run(x)
        if loss.item() < kept.best:
            kept.best = loss.item()
            kept.weights["best"] = copy.deepcopy(kept.model.state_dict())
        return loss

    return several(go, best=1e9, weights={"best": None})


def without_backward(body: Callable[[Any, nn.Module, Tensor], Any]) -> None:
    """A row of a step that runs no backward and no optimizer."""

    def build() -> Training:
        model, kept = network(), SimpleNamespace(seen=0, losses=[])
        return Training(model, None, lambda x: body(kept, model, x), kept=lambda: vars(kept))

    build.__name__ = body.__name__
    step()(build)


def evaluates(kept: Any, model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(x)
    kept.seen += len(x)
    kept.losses.append(loss_of(out).item())
    return out.argmax(-1)


def descends_by_functions(_: Any, model: nn.Module, x: Tensor) -> Tensor:
    held: dict[str, Tensor] = dict(model.named_parameters())

    def loss(given: dict[str, Tensor]) -> Tensor:
        return loss_of(torch.func.functional_call(model, given, (x,)))

    found, value = torch.func.grad_and_value(loss)(held)
    with torch.no_grad():
        for name, parameter in held.items():
            parameter.sub_(found[name], alpha=0.1)
    return value


without_backward(evaluates)
without_backward(descends_by_functions)


EDITED = Refusal(whence.StaleCapture, "`kept.scale` was 1.0 at capture", "a person changed it", of_run=True)


@step(refused=EDITED)
def has_a_scale_that_is_edited() -> Training:
    model, kept = network(), SimpleNamespace(step=0, scale=1.0, log=[])
    optimizer = SGD(model.parameters(), lr=0.1)
    run = plain(model, optimizer)

    def go(x: Tensor) -> Tensor:
        loss = run(x * kept.scale)
        kept.step += 1
        if kept.step % 2 == 0:
            kept.log.append(loss.item())
        return loss

    def between() -> None:
        kept.scale = 3.0 if kept.step == 2 else kept.scale

    return Training(model, optimizer, go, between, lambda: vars(kept))


LATER = Refusal(
    whence.StaleCapture, "it is refused: the step decides by the number", "a text of a number", of_run=True
)


@step(refused=LATER)
def writes_a_text_later() -> Training:
    def go(kept: Any, x: Tensor, run: Run) -> Tensor:
        kept.step += 1
        if kept.step == 3:
            kept.line = f"{run(x).item():.2f}"
        return run(x)

    return several(go, step=0, line="")
