"""What a step changes around it is found again where it is kept, also when that begins anew."""

# ruff: noqa: PLW0108 (a bound method is that of the first list)

from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from tests.tracing.steps.small import batch, small, zero_first
from whence import tracing

Kept = tuple[Callable[[Tensor], Any], Callable[[], Any], Callable[[], Any]]
"""What a step does with its loss, what happens at the end of an epoch, and what is left then."""


class Meter:
    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.steps = 0

    def update(self, loss: Tensor) -> None:
        self.losses.append(loss)
        self.steps += 1


def list_of_object() -> Kept:
    kept = SimpleNamespace(losses=[])
    return (lambda loss: kept.losses.append(loss), lambda: vars(kept).update(losses=[]), lambda: kept.losses)


def list_of_dictionary() -> Kept:
    kept: dict[str, list[Tensor]] = {"losses": []}
    return (lambda loss: kept["losses"].append(loss), lambda: kept.update(losses=[]), lambda: kept["losses"])


def list_that_is_emptied() -> Kept:
    kept: list[Tensor] = []
    return lambda loss: kept.append(loss), kept.clear, lambda: kept


def list_of_closure() -> Kept:
    kept: list[Tensor] = []

    def begin() -> None:
        nonlocal kept
        kept = []

    return lambda loss: kept.append(loss), begin, lambda: kept


def deque_of_object() -> Kept:
    kept = SimpleNamespace(losses=deque(maxlen=2))
    return (
        lambda loss: kept.losses.append(loss),
        lambda: vars(kept).update(losses=deque(maxlen=2)),
        lambda: [*kept.losses],
    )


def new_meter() -> Kept:
    kept = SimpleNamespace(meter=Meter())
    return (
        lambda loss: kept.meter.update(loss),
        lambda: vars(kept).update(meter=Meter()),
        lambda: [*kept.meter.losses, kept.meter.steps],
    )


def meter_under_two_names() -> Kept:
    meters = {"train": Meter()}
    kept = SimpleNamespace(meter=meters["train"], all=meters)

    def update(loss: Tensor) -> None:
        kept.meter.update(loss)
        kept.all["train"].steps += 1

    def begin() -> None:
        kept.meter = meters["train"] = Meter()

    return update, begin, lambda: [*kept.meter.losses, kept.meter.steps]


def meter_under_one_of_two_names() -> Kept:
    """They are one at the beginning, and two afterwards: what was one program cannot say which is meant."""
    meter = Meter()
    kept = SimpleNamespace(meter=meter, other=meter)

    def update(loss: Tensor) -> None:
        kept.meter.update(loss)
        kept.other.steps += 1

    return (
        update,
        lambda: vars(kept).update(meter=Meter()),
        lambda: [*kept.meter.losses, kept.meter.steps, kept.other.steps],
    )


def last_of_dictionary() -> Kept:
    kept = SimpleNamespace(last={})
    return (
        lambda loss: kept.last.update(loss=loss),
        lambda: vars(kept).update(last={}),
        lambda: [*kept.last.values()],
    )


def default_list() -> Kept:
    kept: defaultdict[str, list[Tensor]] = defaultdict(list)
    return lambda loss: kept["loss"].append(loss), kept.clear, lambda: kept["loss"]


def list_where_there_is_none() -> Kept:
    kept: dict[str, list[Tensor]] = {}
    return lambda loss: kept.setdefault("loss", []).append(loss), kept.clear, lambda: kept.get("loss", [])


def list_if_there_is_none() -> Kept:
    kept: dict[str, list[Tensor]] = {}

    def update(loss: Tensor) -> None:
        if "loss" not in kept:
            kept["loss"] = []
        kept["loss"].append(loss)

    return update, kept.clear, lambda: kept.get("loss", [])


def attribute_if_there_is_none() -> Kept:
    kept = SimpleNamespace()

    def update(loss: Tensor) -> None:
        if not hasattr(kept, "losses"):
            kept.losses = []
        kept.losses.append(loss)

    return update, lambda: vars(kept).clear(), lambda: vars(kept).get("losses", [])


def nested_defaults() -> Kept:
    kept: defaultdict[str, defaultdict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    return (
        lambda loss: kept["train"]["loss"].append(loss),
        lambda: kept["train"].clear(),
        lambda: kept["train"]["loss"],
    )


def another_kind() -> Kept:
    """A list, and None at the beginning of the next epoch."""
    kept = SimpleNamespace(losses=[])

    def update(loss: Tensor) -> None:
        if kept.losses is None:
            kept.losses = []
        kept.losses.append(loss)

    return update, lambda: vars(kept).update(losses=None), lambda: kept.losses or []


KEPT = (
    *(list_of_object, list_of_dictionary, list_that_is_emptied, list_of_closure, deque_of_object, new_meter),
    *(meter_under_two_names, meter_under_one_of_two_names, last_of_dictionary, default_list),
    *(list_where_there_is_none, list_if_there_is_none, attribute_if_there_is_none, nested_defaults),
    another_kind,
)


@pytest.mark.parametrize("made", KEPT)
def test_each_epoch_begins_anew(made: Callable[[], Kept]) -> None:
    """Three epochs of three steps: what each leaves is what eager leaves."""
    eager, bound = (epochs(made, is_bound=is_bound) for is_bound in (False, True))
    assert eager == bound


def epochs(made: Callable[[], Kept], *, is_bound: bool) -> list[list[float]]:
    torch.manual_seed(0)
    model, optimizer = small()
    inner, (update, begin, left) = zero_first(model, optimizer), made()

    def step(x: Tensor) -> Tensor:
        loss = inner(x).detach()
        update(loss)
        return loss

    run: Any = step
    if is_bound:
        program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
        run = program.bind(model, optimizer)
    found = []
    for epoch in range(3):
        for number in range(3):
            run(batch() * (1 + epoch + number))
        found.append([float(each) for each in left()])
        begin()
    return found


@pytest.mark.parametrize("made", [list_of_object, new_meter, list_where_there_is_none])
def test_programs_are_not_captured_anew(made: Callable[[], Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    """One program does it for all epochs; a first step that is another program is tried before it."""
    captures, capture = list[int](), tracing.capture_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        captures.append(1)
        return capture(*args, **kwargs)

    monkeypatch.setattr(tracing, "capture_step", counted)
    epochs(made, is_bound=True)
    assert len(captures) <= 2


def test_a_place_that_is_gone_is_named() -> None:
    """Where nothing may be captured again."""
    model, optimizer = small()
    kept, inner = SimpleNamespace(losses=[]), zero_first(model, optimizer)

    def step(x: Tensor) -> None:
        kept.losses.append(inner(x).detach())

    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    bound = program.bind(model, optimizer, on_violation="raise")
    kept.losses = None
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(whence.StaleCapture, match=r"what held `kept\.losses` at capture is not there"):
        bound(batch())
    assert all(map(torch.equal, before, model.parameters()))
