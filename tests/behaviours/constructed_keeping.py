"""Training steps that keep something in Python: counters, lists, the last loss, an average."""

from __future__ import annotations

import enum
import itertools
import json
import math
import pickle
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import whence
from tests.behaviours.constructed_steps import STEPS, Training, network, plain, step
from tests.behaviours.constructions import Refusal

__all__ = ["STEPS"]

READS = Refusal(whence.UnsupportedStep, "the step reads", "what it collects is no input of the program")
CHANGES = Refusal(whence.UnsupportedStep, "the step changes", "a program takes nothing away from a list")
NEEDS = Refusal(whence.DataDependent, "decides by the number", "a text of a number is none of the program's")
SHARED = Refusal(whence.UnsupportedStep, "lies in memory of an input", "eager's would change with the weight")

Run = Callable[[Tensor], Tensor]
Keep = Callable[[Any, Tensor, Run, Optimizer], Any]


def keeping(keep: Keep, optimizer: type[Optimizer] = AdamW, **held: Any) -> Training:
    """A step of a network that does `keep` with what is `held`."""
    model = network()
    made = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    run, kept = plain(model, made), SimpleNamespace(**held)
    return Training(model, made, lambda x: keep(kept, x, run, made), kept=lambda: vars(kept))


@step()
def appends_losses() -> Training:
    return keeping(lambda kept, x, run, _: kept.losses.append(run(x).detach()), losses=[])


class Turning(nn.Linear):
    """Has a dictionary in which it puts an entry last: always the same one, or the first."""

    def __init__(self, name: str | None) -> None:
        super().__init__(4, 4)
        self.name, self.scales = name, OrderedDict(low=2.0, high=3.0)

    def forward(self, x: Tensor) -> Tensor:
        self.scales.move_to_end(self.name or next(iter(self.scales)))
        return super().forward(x) * self.scales["low"]


def turning(name: str | None) -> Training:
    model = Turning(name)
    optimizer = AdamW(model.parameters(), lr=0.1)
    run = plain(model, optimizer)
    return Training(model, optimizer, lambda x: run(x).detach(), kept=lambda: str(model.scales))


@step()
def moves_an_entry_to_the_end() -> Training:
    return turning("low")


@step(refused=CHANGES)
def turns_a_dictionary() -> Training:
    return turning(None)


@step()
def counts_on_a_class() -> Training:
    class Progress:
        taken = 0
        last: Tensor | None = None

    def keep(_: Any, x: Tensor, run: Run, optimizer: Optimizer) -> Tensor:
        Progress.taken += 1
        loss = run(x) * Progress.taken
        Progress.last = loss.detach()
        return loss

    return replace(keeping(keep), kept=lambda: (Progress.taken, Progress.last))


class Teaching:
    """Counts the steps of all that are taught."""

    steps = 0

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = AdamW(self.model.parameters())

    def step(self, x: Tensor) -> Tensor:
        type(self).steps += 1
        return plain(self.model, self.optimizer)(x)


@step(warm=True)
def counts_on_its_own_class() -> Training:
    kind: Any = type("Teaching", (Teaching,), {"steps": 0})
    taught = kind()
    return Training(taught.model, taught.optimizer, taught.step, kept=lambda: kind.steps)


class Stage(enum.Enum):
    """Where a training is."""

    WARM = "warm"
    HOT = "hot"


@step()
def keeps_members_of_an_enumeration() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        kept.stage, kept.left = Stage.HOT, [Stage.WARM, len(kept.passed)]
        kept.passed = [Stage.WARM]  # a new list that holds the same
        return run(x)

    return keeping(keep, stage=Stage.WARM, passed=[Stage.WARM], left=None)


@step()
def appends_numbers_to_several() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        loss = run(x)
        kept.losses.append(loss.item())
        kept.history["loss"] += [loss.item() * 2, loss.detach().sqrt()]
        kept.window.append({"loss": loss.detach(), "size": len(x), "name": "train"})
        return loss

    return keeping(keep, losses=[1.0], history={"loss": []}, window=deque([0], maxlen=2))


@step(warm=True)
def counts_everywhere() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        kept.step += 1
        kept.state["step"] += 1
        kept.counts[0] += len(x)
        return run(x) * kept.step

    return keeping(keep, step=0, state={"step": 10}, counts=[0, 5])


@step()
def sums_losses() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> float:
        loss = run(x)
        kept.total += loss.item() * len(x)
        kept.seen += len(x)
        kept.average = 0.9 * kept.average + 0.1 * loss.item()
        kept.right += (x > 0).sum().item()
        return kept.total / kept.seen

    return keeping(keep, total=0, seen=0, average=1.0, right=0)


@step()
def remembers_the_last_loss() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        loss = run(x)
        kept.last, kept.number = loss.detach(), loss.item()
        kept.logs["loss"] = loss.item()
        kept.logs["batch"] = {"x": x, "mean": x.mean(), "at": "train"}
        kept.is_trained = True
        return loss + kept.last

    return keeping(keep, last=None, number=None, logs={}, is_trained=False)


@step()
def writes_to_a_tensor_and_replaces_it() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        loss = run(x)
        kept.window[0] += loss.detach()
        kept.window = kept.window.roll(1)
        kept.tables["sums"] += x.sum(0)
        kept.tables["sums"] = kept.tables["sums"] / 2
        return loss

    return keeping(keep, window=torch.zeros(3), tables={"sums": torch.zeros(4)})


@step()
def overwrites_tensors() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        loss = run(x)
        kept.last.copy_(torch.full((3,), loss.item()))
        kept.flags.copy_(x.detach().sum(0) > 0)
        return loss

    return keeping(keep, last=torch.zeros(3), flags=torch.zeros(4, dtype=torch.bool))


@step()
def logs_its_count() -> Training:
    """In the first run of a capture the count is a number, and in the second an input."""

    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        loss = run(x)
        kept.step += 1
        kept.log = {"loss": loss.detach(), "step": kept.step, "done": kept.step / 10}
        return loss

    return keeping(keep, step=0, log={})


@step()
def sets_rates_by_its_count() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, optimizer: Optimizer) -> Tensor:
        kept.step += 1
        for group in optimizer.param_groups:
            group["lr"] = kept.base * min(1.0, kept.step / 10) * 0.5**kept.step
        return run(x)

    return keeping(keep, SGD, step=0, base=0.1)


@step()
def nonlocal_counters() -> Training:
    taken, losses = 0, list[float]()

    def keep(_kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        nonlocal taken
        taken += 1
        loss = run(x)
        losses.append(loss.item())
        return loss / taken

    model = network()
    optimizer = AdamW(model.parameters())
    run = plain(model, optimizer)
    return Training(
        model, optimizer, lambda x: keep(None, x, run, optimizer), kept=lambda: (taken, list(losses))
    )


@step()
def counts_in_attributes_of_a_function() -> Training:
    def keep(_: Any, x: Tensor, run: Run, __: Optimizer) -> Tensor:
        loss = run(x)
        held.taken = getattr(held, "taken", 0) + 1
        held.losses.append(loss.item())
        return loss * held.taken

    held: Any = keep
    held.taken, held.losses = 0, []
    return replace(keeping(keep), kept=lambda: (held.taken, held.losses))


class Meter:
    """An average as many training scripts have it."""

    def __init__(self) -> None:
        self.value, self.sum, self.count = 0.0, 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.value = value
        self.sum += value * n
        self.count += n

    @property
    def average(self) -> float:
        return self.sum / self.count


class Metered:
    """A trainer with meters."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer = AdamW(self.model.parameters())
        self.meter, self.meters, self.global_step = Meter(), {"x": Meter()}, 0
        self.last_loss: Any = None

    def training_step(self, x: Tensor) -> dict[str, Any]:
        self.global_step += 1
        loss = plain(self.model, self.optimizer)(x)
        self.meter.update(loss.item(), len(x))
        self.meters["x"].update(x.mean().item())
        self.last_loss = loss.item()
        return {"loss": loss, "average": self.meter.average, "step": self.global_step}


@step()
def meters_in_a_trainer() -> Training:
    trainer = Metered()
    held = (trainer.meter, trainer.meters["x"])
    return Training(
        trainer.model,
        trainer.optimizer,
        trainer.training_step,
        kept=lambda: (trainer.global_step, trainer.last_loss, *(dict(vars(meter)) for meter in held)),
    )


@step()
def every_third_step_is_another() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        kept.step += 1
        return run(x * 2 if kept.step % 3 == 0 else x)

    return keeping(keep, step=0)


def counted(use: Callable[[Any, Tensor], Any], decide: str | None = None) -> None:
    """A row of a step that uses its count where Python or PyTorch want an integer."""

    def build() -> Training:
        def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
            kept.step += 1
            return run(x) * use(kept, x)

        return keeping(keep, step=0, buffer=torch.zeros(4, 4), numbers=[1.0, 2.0, 3.0])

    build.__name__ = use.__name__
    step(decide=decide)(build)


def writes_at_its_count(kept: Any, x: Tensor) -> Any:
    """As a replay buffer does, in a run of one program."""
    kept.buffer[kept.step % 4] = x[0].double()
    kept.buffer[:, kept.step % 2] = x[:4, 0]
    kept.buffer[-kept.step, 1] = kept.step
    return kept.buffer.sum()


def writes_at_what_it_reads(kept: Any, x: Tensor) -> Any:
    row = kept.buffer[kept.step % 2]
    row.add_(x[kept.step % 2])
    return kept.buffer.sum()


def samples_of_what_there_is(kept: Any, x: Tensor) -> Any:
    return x[torch.randint(0, min(kept.step + 1, 4), (3,))].sum()


def slices_by_its_count(kept: Any, x: Tensor) -> Any:
    return x[:, : kept.step].sum() + x.roll(kept.step % 2, 1)[0, 0] + x.sum(kept.step % 2)[0]


def takes_entries_by_its_count(kept: Any, _: Tensor) -> Any:
    return kept.numbers[min(kept.step, 2)] + {0: 1.0, 1: 0.5}.get(kept.step // 2, 0.1)


def goes_round_by_its_count(kept: Any, x: Tensor) -> Any:
    return sum(x[at].sum() for at in range(int(kept.step / 2))) + 1


def rounds_its_count(kept: Any, _: Tensor) -> Any:
    turns, rest = divmod(kept.step, 2)
    return math.ceil(math.sqrt(kept.step)) + round(kept.step / 7, 2) + math.floor(rest / 2) + turns


def computes_with_numbers_of_numpy(kept: Any, _: Tensor) -> Any:
    return np.float64(0.5) * kept.step - np.float64(3) ** kept.step


def looks_at_bits_of_its_count(kept: Any, _: Tensor) -> Any:
    if kept.step & (kept.step - 1) == 0:  # a power of two
        return 0.5
    return (kept.step << 1 | True) + (5 >> kept.step) - (2 ^ ~kept.step)


def asks_what_its_count_is(kept: Any, x: Tensor) -> Any:
    return x.sum().item() if type(kept.step) is int and type(x.sum().item()) is float else 0


def rounds_the_sum(kept: Any, x: Tensor) -> Any:
    kept.last = round(x.sum().item(), 3)
    return math.floor(kept.last)


for each in (
    *(writes_at_its_count, writes_at_what_it_reads, samples_of_what_there_is, slices_by_its_count),
    *(takes_entries_by_its_count, goes_round_by_its_count, rounds_its_count),
    *(computes_with_numbers_of_numpy, rounds_the_sum, looks_at_bits_of_its_count, asks_what_its_count_is),
):
    counted(each)


def needs_its_count_as_a_float(kept: Any, x: Tensor) -> Any:
    return nn.functional.dropout(x, 1 / (1 + float(kept.step))).sum()


counted(needs_its_count_as_a_float, decide="example")
INTEGER = Refusal(whence.DataDependent, "wants the integer itself", r"int\(number\)")
TEXT = Refusal(whence.DataDependent, "decides by the number", "write texts of it")
FLOAT = Refusal(whence.DataDependent, "decides by the number", r"tensor.item\(\) for float")


@step(refused=INTEGER)
def halves_by_its_count() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        kept.step += 1
        return run(x.chunk(kept.step)[0])

    return keeping(keep, step=0)


def decays(number: Callable[[int], Any]) -> Training:
    """A step that sets the weight decay, as a table or its count has it."""

    def keep(kept: Any, x: Tensor, run: Run, optimizer: Optimizer) -> Tensor:
        kept.step += 1
        optimizer.param_groups[0]["weight_decay"] = number(kept.step)
        return run(x)

    return keeping(keep, step=0)


@step()
def decays_by_its_count() -> Training:
    return decays(lambda count: 0.04 + 0.01 * count)


@step(refused=Refusal(whence.UnsupportedStep, "else than a number of Python's", "NumPy's are no inputs"))
def decays_by_a_table_of_numpy() -> Training:
    table = np.linspace(0.04, 0.4, 9)
    return decays(lambda count: table[count])


def refused_with(refusal: Refusal, name: str, use: Callable[[Any], Any]) -> None:
    """A row of a step that asks for more of its count than a program writes down."""

    def build() -> Training:
        def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Any:
            kept.step += 1
            return run(x), use(kept.step)

        return keeping(keep, step=0)

    build.__name__ = name
    step(refused=refusal)(build)


JSON = Refusal(whence.DataDependent, "wants the number itself", "write texts of it")
refused_with(JSON, "writes_its_count_as_json", json.dumps)
refused_with(TEXT, "asks_how_many_bits_its_count_has", lambda count: count.bit_length())
refused_with(TEXT, "asks_for_a_power_with_a_modulus", lambda count: pow(count, 2, 7))
refused_with(TEXT, "pickles_its_count", pickle.dumps)


@step()
def returns_a_number_of_numpy() -> Training:
    rates = np.linspace(0, 1, 5)
    return keeping(lambda _, x, run, __: {"loss": run(x), "rate": rates[2]})


@step(refused=TEXT, decide="example")
def writes_texts_while_the_example_decides() -> Training:
    return keeping(lambda kept, x, run, _: kept.lines.append(f"loss: {run(x).item():.3f}"), lines=[])


@step(refused=FLOAT)
def appends_a_float_of_a_tensor() -> Training:
    return keeping(lambda kept, x, run, _: kept.losses.append(float(run(x))), losses=[])


@step(refused=READS)
def reads_what_it_collects() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Any:
        kept.losses.append(run(x).item())
        return sum(kept.losses[-2:])

    return keeping(keep, losses=[])


@step(refused=READS)
def counts_what_it_collects() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        kept.losses.append(run(x).item())
        return x * 2 if len(kept.losses) > 2 else x

    return keeping(keep, losses=[])


@step()
def averages_tensors() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Any:
        loss = run(x)
        kept.average = 0.9 * kept.average + 0.1 * loss.detach()
        return loss

    return keeping(keep, average=torch.tensor(0.0))


@step(refused=CHANGES)
def forgets_old_losses() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Any:
        kept.losses.pop()
        return run(x)

    return keeping(keep, losses=[1.0, 2.0, 3.0])


@step()
def begins_once() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Any:
        if kept.mean is None:
            kept.mean = x.mean()
        return run(x)

    return keeping(keep, mean=None)


@step(refused=NEEDS)
def writes_texts() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Any:
        kept.lines.append(f"{run(x).item():.3f}")

    return keeping(keep, lines=[])


@step(refused=SHARED)
def keeps_a_view_of_a_weight() -> Training:
    model = network()
    optimizer, kept = AdamW(model.parameters()), SimpleNamespace(first=None)
    run = plain(model, optimizer)

    def step(x: Tensor) -> Tensor:
        kept.first = next(model.parameters()).detach()
        return run(x)

    return Training(model, optimizer, step, kept=lambda: vars(kept))


@dataclass(slots=True)
class Slotted:
    last: float = 0.0
    taken: int = 0
    made: Tensor | None = None
    lines: list[Any] = field(default_factory=list)


@step()
def keeps_in_slots() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Tensor:
        loss = run(x)
        kept.slotted.taken += 1
        kept.slotted.last, kept.slotted.made = loss.item(), loss.detach() * 2
        kept.slotted.lines.append(loss.item())
        return loss * kept.slotted.taken

    slotted = Slotted()
    return replace(keeping(keep, slotted=slotted), kept=lambda: astuple(slotted))


def counts_in_an_array(kept: Any, _: Tensor) -> None:
    kept.array[0] += 1


def takes_from_an_iterator(kept: Any, loss: Tensor) -> Any:
    return loss * next(kept.numbers)


def draws_from_its_own_generator(kept: Any, loss: Tensor) -> Any:
    return loss * kept.drawn[0].random()


def draws_from_its_own_generator_of_numpy(kept: Any, loss: Tensor) -> Any:
    return loss * kept.drawn.random()


def writes_into_a_tuple(kept: Any, loss: Tensor) -> None:
    kept.lists[0].append(loss.item())


def draws_from_a_loader(kept: Any, loss: Tensor) -> Any:
    return loss * next(kept.batches)


def batches() -> Any:
    return iter(DataLoader(TensorDataset(torch.ones(2))))


REFUSED: tuple[tuple[Callable[[Any, Tensor], Any], str, Callable[[], dict[str, Any]]], ...] = (
    (counts_in_an_array, "changes kept.array", lambda: {"array": np.zeros(2)}),
    (takes_from_an_iterator, "which is an iterator", lambda: {"numbers": itertools.count()}),
    (draws_from_a_loader, "which is an iterator", lambda: {"batches": batches()}),
    (draws_from_its_own_generator, r"changes kept.drawn\[0\]", lambda: {"drawn": [random.Random(0)]}),
    (
        draws_from_its_own_generator_of_numpy,
        "changes kept.drawn",
        lambda: {"drawn": np.random.default_rng(0)},
    ),
    (writes_into_a_tuple, r"changes kept.lists\[0\]", lambda: {"lists": ([],)}),
)


def add(body: Callable[[Any, Tensor], Any], words: str, held: Callable[[], dict[str, Any]]) -> None:
    """A row of what no program repeats, and of what nobody can look into."""

    def build() -> Training:
        kept = SimpleNamespace(**held())
        return keeping_in(kept, lambda loss: body(kept, loss))

    build.__name__ = body.__name__
    step(refused=Refusal(whence.UnsupportedStep, words, "it would be a constant, or left out"))(build)


def keeping_in(kept: SimpleNamespace, finish: Callable[[Tensor], Any]) -> Training:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = plain(model, optimizer)

    def step(x: Tensor) -> Any:
        return finish(run(x)) if kept else None

    return Training(model, optimizer, step, kept=lambda: str(vars(kept)))


for row in REFUSED:
    add(*row)


CLOCK = Refusal(whence.SideEffect, r"calls time\.perf_counter\(\)", "the capture's time is no run's time")


@step(refused=CLOCK)
def logs_how_long_it_takes() -> Training:
    def keep(kept: Any, x: Tensor, run: Run, _: Optimizer) -> Any:
        begun = time.perf_counter()
        loss = run(x)
        kept.times.append(time.perf_counter() - begun)
        return loss

    return keeping(keep, times=[])


@step(refused=CLOCK)
def computes_with_the_time() -> Training:
    return keeping(lambda _kept, x, run, _: run(x) * time.perf_counter())
