"""What a step reads outside of itself is a constant of its program: another value is refused by name."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial, partialmethod, singledispatch, wraps
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import whence
from tests.checks import differing, state
from tests.tracing.steps.small import batch, small, zero_first
from whence.errors import StaleCapture
from whence.execution.bound import Bound

FACTOR = 1.0
log = logging.getLogger(__name__)


@dataclass
class Options:
    scale: float = 1.0
    epoch: int = 0


DEFAULT = Options()


class Frozen:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def as_it_is(value: Tensor) -> Tensor:
    return value


def negated(value: Tensor) -> Tensor:
    return -value


def from_the_file(value: Tensor) -> Tensor:
    return value * FACTOR


@dataclass
class Trainer:
    """Everything that a step may read, and `epoch`, which it does not."""

    model: nn.Module
    optimizer: Optimizer
    options: Options = field(default_factory=Options)
    frozen: Frozen = field(default_factory=Frozen)
    table: dict[str, Any] = field(default_factory=lambda: {"scale": 1.0, "inner": [1.0]})
    names: set[int] = field(default_factory=lambda: {1})
    recent: deque[float] = field(default_factory=lambda: deque([1.0]))
    weight: Tensor = field(default_factory=lambda: torch.ones(2))
    function: Callable[[Tensor], Tensor] = as_it_is
    dtype: torch.dtype = torch.float32
    epoch: int = 0

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = (self.model(x).to(self.dtype) * self.weight).sin().mean()
        loss = self.function(from_the_file(loss)) * self.scaled * math.pi
        loss.backward()
        self.optimizer.step()
        return loss * len(self.names) * self.recent[0]

    @property
    def scaled(self) -> float:
        inner: float = self.table["inner"][0]
        return self.options.scale * self.frozen.scale * inner * getattr(self, "extra", 1.0)


def bound() -> tuple[Trainer, Bound]:
    trainer = Trainer(*small())
    program = whence.capture_step(trainer.step, (batch(),), model=trainer.model, optimizer=trainer.optimizer)
    return trainer, program.bind(trainer.model, trainer.optimizer)


def refusal(run: Callable[..., Any], model: nn.Module) -> str:
    """What a call says, that changes nothing."""
    before = state(model)
    with pytest.raises(StaleCapture) as caught:
        run(batch())
    assert differing(before, state(model)) == []
    assert "pass as an argument of the step" in str(caught.value)
    violations: Any = caught.value.violations
    rows = [(row.guard.what, row.guard.expected, row.found) for row in violations]
    return "\n".join(f"`{what}` was {then} at capture, is {now} now" for what, then, now in rows)


def change(trainer: Trainer, name: str) -> None:
    match name:
        case "scale":
            trainer.options.scale = 0.5
        case "options":
            trainer.options = Options(2.0)
        case "slot":
            trainer.frozen.scale = 0.5
        case "entry":
            trainer.table["inner"][0] = 1
        case "newcomer":
            trainer.table["more"] = 1
        case "set":
            trainer.names.add(2)
        case "deque":
            trainer.recent.append(2.0)
        case "tensor":
            trainer.weight = torch.zeros(2)
        case "function":
            trainer.function = negated
        case "kind":
            trainer.dtype = torch.float64
        case "absent":
            trainer.extra = 2.0  # type: ignore[attr-defined]
        case "gone":
            del trainer.options


CHANGES = {
    "scale": "`Trainer.options.scale` was 1.0 at capture, is 0.5 now",
    "options": "`Trainer.options.scale` was 1.0 at capture, is 2.0 now",
    "slot": "`Trainer.frozen.scale` was 1.0 at capture, is 0.5 now",
    "entry": "`Trainer.table['inner']` was [1.0] at capture, is one whose item [0] is 1 now",
    "newcomer": "`the keys of Trainer.table` was ('scale', 'inner') at capture, "
    "is ('scale', 'inner', 'more') now",
    "set": "`Trainer.names` was {1} at capture, is {1, 2} now",
    "deque": "`the length of Trainer.recent` was 1 at capture, is 2 now",
    "tensor": "`Trainer.weight` was Tensor float32[2] at capture, is another Tensor float32[2] now",
    "function": "`Trainer.function` was as_it_is at capture, is negated now",
    "kind": "`Trainer.dtype` was torch.float32 at capture, is torch.float64 now",
    "absent": "`Trainer.extra` was absent at capture, is 2.0 now",
    "gone": "`Trainer.options` was a Options at capture, is absent now\n"
    "`Trainer.options.scale` was 1.0 at capture, is absent now",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_trainer_holds_is_compared(name: str) -> None:
    """Attributes, also of what it holds, and entries: another value is refused, with both values."""
    trainer, run = bound()
    change(trainer, name)
    assert refusal(run, trainer.model) == CHANGES[name]


def test_what_is_not_read_may_change() -> None:
    """An attribute that the step does not read, numbers of a tensor, and an equal value in the place."""
    trainer, run = bound()
    (model, optimizer) = small()
    eager = Trainer(model, optimizer)
    for one in (trainer, eager):
        one.epoch, one.options = 3, Options(1.0, epoch=7)
        one.weight.mul_(0.5)
    assert torch.equal(run(batch()), eager.step(batch()))
    assert differing(state(model), state(trainer.model)) == []


def test_variables_of_files_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global of a function that the step calls, and the function itself."""
    trainer, run = bound()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "FACTOR", 0.5)
        assert refusal(run, trainer.model) == "`global FACTOR` was 1.0 at capture, is 0.5 now"
    with monkeypatch.context() as patch:
        patch.setattr(math, "pi", 3)
        assert refusal(run, trainer.model) == "`global math.pi` was 3.141592653589793 at capture, is 3 now"
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "from_the_file", negated)
        assert (
            refusal(run, trainer.model)
            == "`global from_the_file` was from_the_file at capture, is negated now"
        )
    run(batch())


def test_variables_of_functions_are_compared() -> None:
    """Of the function around the step, of one that it calls, and of a method that it was given."""
    model, optimizer = small()
    alpha, beta, options = 1.0, 1.0, Options()

    def set_to(first: float, second: float) -> None:
        nonlocal alpha, beta
        alpha, beta = first, second

    def scaled(loss: Tensor) -> Tensor:
        return loss * beta

    def step(x: Tensor, given: Options) -> Tensor:
        optimizer.zero_grad()
        loss = scaled(model(x).sin().mean()) * alpha * given.scale
        loss.backward()
        optimizer.step()
        return loss

    program = whence.capture_step(partial(step, given=options), (batch(),), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    set_to(0.5, 0.5)
    said = refusal(run, model)
    assert "`closure alpha` was 1.0 at capture, is 0.5 now" in said
    assert "`closure beta` was 1.0 at capture, is 0.5 now" in said
    set_to(1.0, 1.0)
    options.scale = 0.5
    assert refusal(run, model) == "`given.scale` was 1.0 at capture, is 0.5 now"


class Registry:
    """A class that keeps what its methods give."""

    table: ClassVar[dict[str, float]] = {"scale": 1.0}

    @classmethod
    def scale(cls) -> float:
        """Of the table."""
        return cls.table["scale"]


def with_attribute(value: Tensor, *, factor: float = 1.0) -> Tensor:
    return value * with_attribute.scale * factor  # type: ignore[attr-defined]


with_attribute.scale = 1.0  # type: ignore[attr-defined]


class Constant:
    """A descriptor."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __get__(self, _thing: object, _kind: type) -> float:
        return self.value


class OfScales(type):
    """A class whose classes have a scale."""

    number = 1.0

    @property
    def scale(cls) -> float:
        return cls.number


class Scaling(metaclass=OfScales):
    """Scales in all the ways in which Python runs code that nobody names."""

    kept = Constant(1.0)

    def __init__(self) -> None:
        self.__dict__["table"] = {"computed": self.cached}

    @cached_property
    def cached(self) -> float:
        """Computed once."""
        return 1.0

    def __call__(self, value: Tensor) -> Tensor:
        return value * self.kept

    def __getattr__(self, name: str) -> float:
        return float(self.__dict__["table"][name])

    def by(self, factor: float, value: Tensor) -> Tensor:
        return value * factor

    once = partialmethod(by, 1.0)


@singledispatch
def overloaded(value: object) -> Any:
    return value


def registered(_patch: object) -> None:
    overloaded.register(Tensor, lambda value: value * 0.5)


SCALING = Scaling()
WEAK = ref(DEFAULT)
NAMES = SimpleNamespace(scale=1.0)
BEHIND = {"scale": 1.0}
PROXY, ARRAY = MappingProxyType(BEHIND), np.ones(1)
AROUND: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[pytest.MonkeyPatch], None], str]] = {
    "attribute of a function": (
        with_attribute,
        lambda patch: patch.setattr(with_attribute, "scale", 0.5),
        "`global with_attribute.scale` was 1.0 at capture, is 0.5 now",
    ),
    "default of a function": (
        with_attribute,
        lambda patch: patch.setattr(with_attribute, "__kwdefaults__", {"factor": 0.5}),
        "`a default argument of with_attribute` was 1.0 at capture, is 0.5 now",
    ),
    "table of a class": (
        lambda value: value * Registry.scale(),
        lambda patch: patch.setitem(Registry.table, "scale", 0.5),
        "`Registry.table` was {'scale': 1.0} at capture, is one whose item ['scale'] is 0.5 now",
    ),
    "method of a class": (
        lambda value: value * Registry.scale(),
        lambda patch: patch.setattr(Registry, "scale", classmethod(lambda _: 0.5)),
        "`Registry.scale` was",
    ),
    "proxy": (
        lambda value: value * PROXY["scale"],
        lambda patch: patch.setitem(BEHIND, "scale", 0.5),
        "`global PROXY['scale']` was 1.0 at capture, is 0.5 now",
    ),
    "array": (
        lambda value: value * float(ARRAY[0]),
        lambda patch: patch.setitem(globals(), "ARRAY", np.zeros(1)),
        "`global ARRAY` was",
    ),
    "method that Python calls": (
        lambda value: SCALING(value) * 1.0,
        lambda patch: patch.setattr(Scaling, "__call__", lambda _, value: value * 0.5),
        "`Scaling.__call__` was",
    ),
    "descriptor": (
        lambda value: SCALING(value) * 1.0,
        lambda patch: patch.setattr(vars(Scaling)["kept"], "value", 0.5),
        "`Scaling.kept.value` was 1.0 at capture, is 0.5 now",
    ),
    "what computes attributes": (
        lambda value: value * SCALING.computed,
        lambda patch: patch.setitem(vars(SCALING)["table"], "computed", 0.5),
        "`SCALING.table` was",
    ),
    "what is computed once": (
        lambda value: value * SCALING.cached,
        lambda patch: patch.setitem(vars(SCALING), "cached", 0.5),
        "`SCALING.cached` was 1.0 at capture, is 0.5 now",
    ),
    "partial method": (
        lambda value: SCALING.once(value) * 1.0,
        lambda patch: patch.setattr(Scaling, "once", partialmethod(Scaling.by, 0.5)),
        "`Scaling.once.args` was (1.0,) at capture",
    ),
    "property of a metaclass": (
        lambda value: value * Scaling.scale,
        lambda patch: patch.setattr(OfScales, "scale", 0.5),
        "`OfScales.scale` was",
    ),
    "overload": (
        lambda value: overloaded(value) * 1.0,
        registered,
        "`the keys of global overloaded.registry` was",
    ),
    "weak reference": (
        lambda value: value * WEAK().scale,  # type: ignore[union-attr]
        lambda patch: patch.setattr(DEFAULT, "scale", 0.5),
        "`WEAK.scale` was 1.0 at capture, is 0.5 now",
    ),
    "attribute that is asked for": (
        lambda value: value * 0.5 if hasattr(NAMES, "halved") else value,
        lambda patch: patch.setattr(NAMES, "halved", True, raising=False),
        "`NAMES.halved` was absent at capture, is True now",
    ),
    "environment": (
        lambda value: value * float(os.environ.get("SCALE_OF_A_TEST", "1")),
        lambda patch: patch.setenv("SCALE_OF_A_TEST", "0.5"),
        "`os.environ['SCALE_OF_A_TEST']` was None at capture, is '0.5' now",
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_functions_is_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they carry, what classes and arrays hold, and the environment."""
    scaled, change_it, words = AROUND[name]
    model, optimizer = small()

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = scaled(model(x).sin().mean())
        loss.backward()
        optimizer.step()
        return loss

    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    run(batch())
    change_it(monkeypatch)
    assert words in refusal(run, model)


class Lightning(nn.Module):
    """A trainer that is a module, and no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.optimizer = small()
        self.scale, self.unread = 1.0, 0

    def step(self, x: Tensor, options: Options = DEFAULT, *, other: Options = DEFAULT) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.net(x).sin().mean() * self.scale * options.scale
        loss.backward()
        self.optimizer.step()
        return loss


def test_trainer_may_be_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attributes, and those of defaults."""
    trainer = Lightning()
    net, optimizer = trainer.net, trainer.optimizer
    program = whence.capture_step(trainer.step, (batch(),), model=net, optimizer=optimizer)
    run = program.bind(net, optimizer)
    trainer.unread = 1
    run(batch())
    trainer.scale = 0.5
    monkeypatch.setattr(DEFAULT, "scale", 0.5)
    said = refusal(run, net)
    assert "`Lightning.scale` was 1.0 at capture, is 0.5 now" in said
    assert "`a default argument of step.scale` was 1.0 at capture, is 0.5 now" in said


def test_decorators_and_namespaces_are_looked_into() -> None:
    """A decorator's own variables, a namespace, a table that is asked for an entry that it lacks."""
    model, optimizer = small()
    inner, factor = zero_first(model, optimizer), [1.0]
    names, table = SimpleNamespace(scale=1.0), defaultdict(float, {"scale": 1.0})

    def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any) -> Any:
            return function(*args) * factor[0]

        return run

    @torch.enable_grad()
    @scaled
    def step(x: Tensor) -> Tensor:
        log.debug("a message fills a cache of the logger's")
        loss: Tensor = inner(x) * names.scale * table["scale"]
        return loss

    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    run = program.bind(model, optimizer)
    run(batch())
    factor[0], names.scale = 2.0, 2.0
    table.clear()
    said = refusal(run, model)
    assert "`closure factor` was [1.0] at capture, is one whose item [0] is 2.0 now" in said
    assert "`names.scale` was 1.0 at capture, is 2.0 now" in said
    assert "`closure table['scale']` was 1.0 at capture, is absent now" in said
    assert "`the keys of closure table` was ('scale',) at capture, is () now" in said
    assert not table
    variables = run.program.guards.variables
    assert copy.deepcopy(variables) == variables, "a copy of a program speaks of the same variables"


def test_attribute_is_no_variable_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`given.epoch` reads no global `epoch`: notebooks have many of these."""
    model, optimizer = small()
    monkeypatch.setitem(globals(), "epoch", 0)

    def step(x: Tensor, given: Options) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).sin().mean() * (1 + given.epoch)
        loss.backward()
        optimizer.step()
        return loss

    program = whence.capture_step(
        partial(step, given=Options()), (batch(),), model=model, optimizer=optimizer
    )
    monkeypatch.setitem(globals(), "epoch", 1)
    program.bind(model, optimizer)(batch())


def test_what_a_helper_counts_is_advanced() -> None:
    """A counter of a function that the step calls is an input, as one of the step's own."""
    (model, optimizer), calls = small(), [0]
    inner = zero_first(model, optimizer)

    def counted() -> int:
        calls[0] += 1
        return calls[0]

    def step(x: Tensor) -> Tensor:
        loss: Tensor = inner(x) * counted()
        return loss

    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert calls == [0]
    assert program.input("calls[0]").kind == "step_state"
    run = program.bind(model, optimizer)
    run(batch())
    run(batch())
    assert calls == [2]


def test_what_cannot_be_watched_is_said() -> None:
    """Among what no guard watches."""
    _, run = bound()
    assert any("what the step reads through" in str(row) for row in run.program.guards.unguarded)
