"""Marks on tensors and functions, context variables, descriptors, and things that become one."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.weak import WeakTensorKeyDictionary

from tests.behaviours.values_outside import (
    OUTSIDE,
    ROWS,
    SAME,
    Box,
    Read,
    Reading,
    Row,
    Scene,
    in_model,
    network,
    row,
    scene,
)

__all__ = ["ROWS"]


class Doubling(Box):
    """The same with another method."""

    def apply(self, loss: Tensor) -> Tensor:
        return loss * self.value * 2


class Keeping(Box):
    """The same with a method."""

    def apply(self, loss: Tensor) -> Tensor:
        return loss * self.value


# --- marks on tensors and functions ----------------------------------------------------------------------


@row("mark")
def a_mark_on_a_weight() -> Scene:
    model: Any = network()
    model[0].weight.mark = 2.0
    return scene(
        lambda loss: loss * model[0].weight.mark,
        lambda number: setattr(model[0].weight, "mark", 2.0 + number),
        model,
    )


@row("mark")
def a_mark_that_comes_later() -> Scene:
    model: Any = network()

    def read(loss: Tensor) -> Tensor:
        for held in model.parameters():
            loss = loss + held.square().sum() * getattr(held, "mark", 0.0)
        return loss

    return scene(read, lambda number: setattr(model[2].bias, "mark", 1.0) if number > 2 else None, model)


@row("mark")
def a_mark_that_goes() -> Scene:
    held: Any = torch.ones(1)
    held.mark = 2.0
    return scene(
        lambda loss: loss * getattr(held, "mark", 1.0),
        lambda number: delattr(held, "mark") if number == 2 else None,
    )


@row(SAME)
def a_mark_that_the_step_counts_in() -> Scene:
    model: Any = network()
    model[0].weight.mark = 0

    def read(loss: Tensor) -> Tensor:
        model[0].weight.mark += 1
        return loss * model[0].weight.mark

    return scene(read, lambda _: None, model)


@row(SAME)
def a_mark_that_no_code_names() -> Scene:
    model: Any = network()
    return scene(lambda loss: loss, lambda number: setattr(model[0].weight, "unread_mark", number), model)


@row("mark")
def a_mark_on_a_function() -> Scene:
    def helper(loss: Tensor) -> Tensor:
        return loss * getattr(helper, "mark", 1.0)

    return scene(helper, lambda number: setattr(helper, "mark", 2.0) if number > 1 else None)


@row("mark")
def a_mark_on_a_forward() -> Scene:
    class Marked(Reading):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * getattr(self.forward, "mark", 1.0)

    model = Marked(lambda _, y: y)
    change = lambda number: setattr(Marked.forward, "mark", 2.0) if number > 1 else None  # noqa: E731
    return scene(lambda loss: loss, change, model)


@row("Tensor float32[1]")
def a_tensor_of_another_shape() -> Scene:
    held = torch.ones(1)
    return scene(lambda loss: loss * held.shape[0], lambda number: held.resize_(1 + (number > 1)).fill_(1.0))


# --- context variables, descriptors, opaque objects ------------------------------------------------------


def in_context(value: Any, read: Callable[[Any], float], change: Callable[[Any, int], Any]) -> Scene:
    variable: ContextVar[Any] = ContextVar("variable", default=1.0)
    variable.set(value)

    def helper() -> float:
        return read(variable.get())

    return scene(lambda loss: loss * helper(), partial(change, variable))


CONTEXTS: dict[str, tuple[Any, Any, Any]] = {
    "a_number": (1.0, lambda held: held, lambda variable, number: variable.set(1.0 + number)),
    "an_object": (
        Box(),
        lambda held: held.value,
        lambda variable, number: setattr(variable.get(), "value", 1.0 + number),
    ),
    "an_entry": (
        {"scale": 1.0},
        lambda held: held["scale"],
        lambda variable, number: variable.get().update(scale=1.0 + number),
    ),
}
ROWS += [
    Row(f"in_context_is_{name}", partial(in_context, *parts), "variable") for name, parts in CONTEXTS.items()
]


@row("later")
def a_context_variable_that_is_set_later() -> Scene:
    variable: ContextVar[float] = ContextVar("later")
    return in_model(
        lambda _, y: y * variable.get(1.0), lambda _, number: variable.set(2.0) if number > 1 else None
    )


@row("value")
def an_object_in_a_context_variable_of_a_model() -> Scene:
    variable: ContextVar[Box] = ContextVar("held")
    variable.set(Box())
    return in_model(
        lambda self, y: y * self.variable.get().value,
        lambda model, number: setattr(model.variable.get(), "value", 1.0 + number),
        variable=variable,
    )


@row("held")
def what_a_descriptor_looks_up() -> Scene:
    held = [1.0]

    class Looking:
        def __get__(self, holder: object, kind: type | None = None) -> float:
            return held[0]

    class Described(Reading):
        scale = Looking()

    model = Described(lambda self, y: y * self.scale)
    return scene(lambda loss: loss, lambda number: held.__setitem__(0, 1.0 + number), model)


@row("table")
def what_a_file_answers_for() -> Scene:
    table, file = {"scale": 1.0}, ModuleType("file")
    file.__getattr__ = lambda name: table[name]  # type: ignore[method-assign]
    return scene(lambda loss: loss * file.scale, lambda number: table.update(scale=1.0 + number))


@row("value")
def what_an_operator_of_an_object_reads() -> Scene:
    RAISING.value = 1.0
    return in_model(lambda _, y: y * (RAISING**2), lambda _, number: setattr(RAISING, "value", 1.0 + number))


class Raising(Box):
    """An object that is raised to powers."""

    def __pow__(self, power: float) -> float:
        return float(self.value**power)


RAISING = Raising()


@row("table")
def an_entry_under_a_parameter() -> Scene:
    model, table = network(), WeakTensorKeyDictionary()
    first = model[0].weight
    return scene(
        lambda loss: loss * (1.0 + table.get(first, 0.0)),
        lambda number: table.__setitem__(first, float(number)),
        model,
    )


@row("Struct")
def another_object_of_c() -> Scene:
    box: Any = Box()
    box.form = struct.Struct("i")
    return scene(
        lambda loss: loss * box.form.size,
        lambda number: setattr(box, "form", struct.Struct("ii")) if number > 1 else None,
    )


@row("Keeping")
def an_object_of_another_class() -> Scene:
    box: Any = Box()
    box.loss = Keeping()
    return scene(
        lambda loss: box.loss.apply(loss) + 0.0,
        lambda number: setattr(box, "loss", Doubling()) if number > 1 else None,
    )


@row(SAME)
def another_object_of_the_class() -> Scene:
    box: Any = Box()
    box.loss = Keeping()
    return scene(lambda loss: box.loss.apply(loss) + 0.0, lambda _: setattr(box, "loss", Keeping()))


class Shared:
    """Its instances have one state."""

    state: ClassVar[dict[str, Any]] = {}
    taken: int

    def __init__(self) -> None:
        self.__dict__ = self.state


@row(SAME)
def objects_with_one_state() -> Scene:
    first, second = Shared(), Shared()
    first.taken = 0

    def read(loss: Tensor) -> Tensor:
        first.taken += 1
        return loss * second.taken

    return scene(read, lambda _: None)


class Making(OrderedDict[str, type]):
    """A registry that makes what it is asked for, as that of activations in transformers does."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)(1.0)


@row(SAME)
def a_registry_that_makes_what_it_is_asked_for() -> Scene:
    registry = Making(box=Box)
    return scene(lambda loss: loss * registry["box"].value, lambda _: None)


class Calling(Box):
    """An object that is called."""

    def __call__(self, *given: Any) -> Any:
        return given[-1] * OUTSIDE.value

    def scaled(self, by: float, loss: Tensor) -> Tensor:
        """Reads itself."""
        return loss * by * self.value

    @property
    def outside(self) -> float:
        return OUTSIDE.value


def of_model(run: Callable[[Any, Tensor], Tensor], **held: Any) -> Scene:
    """A model that comes to the object of this file."""
    OUTSIDE.value = 1.0
    return in_model(run, lambda _, number: setattr(OUTSIDE, "value", 1.0 + number), **held)


CALLED: dict[str, Callable[[], Scene]] = {
    "an_object_that_a_model_calls": lambda: of_model(lambda self, y: self.call(y), call=Calling()),
    "one_in_a_list": lambda: of_model(lambda self, y: self.calls[0](y), calls=[Calling()]),
    "a_property_of_one": lambda: of_model(lambda self, y: y * self.call.outside, call=Calling()),
}
ROWS += [Row(f"what_{name}_reads", make, "value") for name, make in CALLED.items()]


@row("value")
def what_a_hook_reads_that_is_an_object() -> Scene:
    OUTSIDE.value = 1.0
    model = network()
    model[0].register_forward_hook(Calling())
    return scene(lambda loss: loss, lambda number: setattr(OUTSIDE, "value", 1.0 + number), model)


@row("value")
def what_a_method_behind_a_partial_reads() -> Scene:
    held = Calling()
    fixed = partial(held.scaled, 2.0)
    return scene(lambda loss: fixed(loss), lambda number: setattr(held, "value", 1.0 + number))  # noqa: PLW0108


@row("by")
def what_is_read_of_the_class_of_an_object() -> Scene:
    class Classed:
        by = 1.0

    held = Classed()
    return scene(lambda loss: loss * type(held).by, lambda number: setattr(Classed, "by", 1.0 + number))


@cache
def settings() -> Box:
    return Box()


@row("value")
def what_a_cached_function_gives() -> Scene:
    settings().value = 1.0
    return scene(
        lambda loss: loss * settings().value, lambda number: setattr(settings(), "value", 1.0 + number)
    )


# --- what is one, or two ---------------------------------------------------------------------------------


class Pair:
    """Two things, the first of which is written while the second is read."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


def become(change: Callable[[Pair], Any], pair: Pair, write: Read, read: Read, back: Read) -> Scene:
    def step_of(loss: Tensor) -> Tensor:
        write(pair.first)
        loss = loss * read(pair.second)
        back(pair.first)
        return loss

    return scene(step_of, lambda number: change(pair) if number == 2 else None)


def join(pair: Pair) -> None:
    pair.second = pair.first


def part(pair: Pair) -> None:
    pair.second = pair.second.copy()


LISTS = (lambda held: held.append(1.0), len, lambda held: held.pop())
DICTS = (lambda held: held.update(a=2.0), lambda held: held["a"], lambda held: held.update(a=1.0))
SETS = (lambda held: held.add(2), len, lambda held: held.discard(2))
ARRAYS = (
    lambda held: held.__setitem__(0, 3.0),
    lambda held: float(held[0]),
    lambda held: held.__setitem__(0, 1.0),
)
OBJECTS = (
    lambda held: setattr(held, "value", 3.0),
    lambda held: held.value,
    lambda held: setattr(held, "value", 1.0),
)
JOINED: dict[str, tuple[Callable[[], Pair], Any]] = {
    "lists": (lambda: Pair([1.0], [1.0]), LISTS),
    "dictionaries": (lambda: Pair({"a": 1.0}, {"a": 1.0}), DICTS),
    "sets": (lambda: Pair({1}, {1}), SETS),
    "arrays": (lambda: Pair(np.ones(2), np.ones(2)), ARRAYS),
    "objects": (lambda: Pair(Box(), Box()), OBJECTS),
}
ROWS += [
    Row(f"two_{name}_become_one", lambda pair=pair, does=does: become(join, pair(), *does), "second")  # type: ignore[misc]
    for name, (pair, does) in JOINED.items()
]


@row("second")
def one_list_becomes_two() -> Scene:
    held = [1.0]
    pair = Pair(held, held)
    return scene(
        lambda loss: loss * (1.0 if pair.first is pair.second else 2.0),
        lambda number: part(pair) if number == 2 else None,
    )


@row("second")
def two_lists_of_a_model_become_one() -> Scene:
    def run(self: Any, y: Tensor) -> Tensor:
        self.first.append(1.0)
        y = y * len(self.second)
        self.first.pop()
        return y

    return in_model(
        run,
        lambda model, number: setattr(model, "second", model.first) if number == 2 else None,
        first=[1.0],
        second=[1.0],
    )


@row(SAME)
def two_counters_become_one() -> Scene:
    pair = Pair({"n": 0}, {"n": 0})

    def read(loss: Tensor) -> Tensor:
        pair.first["n"] += 1
        pair.second["n"] += 2
        return loss * pair.first["n"]

    return scene(read, lambda number: join(pair) if number == 2 else None)


# --- what may change -------------------------------------------------------------------------------------


@row(SAME)
def losses_that_others_append() -> Scene:
    losses: list[float] = []

    def read(loss: Tensor) -> Tensor:
        losses.append(loss.item())
        return loss

    return scene(read, lambda number: losses.clear() if number % 3 == 2 else losses.append(0.5))


@row(SAME)
def weights_that_are_swapped() -> Scene:
    model = network()
    average = [held.detach().clone() for held in model.parameters()]

    def change(number: int) -> None:
        for held, other in zip(model.parameters(), average, strict=True) if number % 3 == 1 else ():
            held.data = other.clone()

    return scene(lambda loss: loss, change, model, AdamW(model.parameters(), lr=0.1))
