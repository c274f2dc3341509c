"""What a function reads counts where it ran, however code came to it: by no name that another code spells."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import whence
from whence._torch.function_tracer import FunctionTracer
from whence.tracing.reads.outside.running_code import RunningFunctions

X = torch.ones(3)
SCALE = 2.0
HERE = sys.modules[__name__]


class Base:
    """Settings with what others inherit."""

    def inherited(self) -> float:
        return SCALE


class Settings(Base):
    """Settings whose methods call one another."""

    def first(self) -> float:
        return 3.0

    def second(self) -> float:
        return SCALE

    def through(self) -> float:
        return self.second()

    def __add__(self, other: Any) -> Any:
        return other + SCALE

    def __len__(self) -> int:
        return int(SCALE)

    def __bool__(self) -> bool:
        return SCALE > 3

    def __contains__(self, _: object) -> bool:
        return SCALE > 3


class Covering(Settings):
    """Settings with a method in the place of a base's, which it calls."""

    def second(self) -> float:
        return super().second() + 1


class Outer:
    """Settings inside of settings."""

    def __init__(self) -> None:
        self.inner = Settings()

    def through(self) -> float:
        return self.inner.through()


SETTINGS, COVERING, OUTER = Settings(), Covering(), Outer()


def by_first(x: Tensor) -> Tensor:
    return x * SETTINGS.first()


def by_second(x: Tensor) -> Tensor:
    return x * SETTINGS.second()


def by_argument(x: Tensor, settings: Any) -> Tensor:
    return x * settings.through()


def made() -> Settings:
    return Settings()


class Constructed:
    """Reads a variable, and an attribute of its class, when it is made."""

    step = 2.0

    def __init__(self) -> None:
        self.value = SCALE * self.step

    @classmethod
    def make(cls) -> "Constructed":
        return cls()

    @staticmethod
    def make_one() -> "Constructed":
        return Constructed()

    def another(self) -> "Constructed":
        return type(self)()

    def one_more(self) -> "Constructed":
        return self.__class__()


class New:
    """Reads a variable before there is an instance."""

    value: float

    def __new__(cls) -> "New":
        found = object.__new__(cls)
        found.value = SCALE
        return found


class Slotted:
    """Has no value in its slot yet where its constructor begins."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0 if hasattr(self, "value") else SCALE


@dataclass
class Post:
    """Reads a variable behind what Python makes."""

    count: int = 1
    value: float = field(init=False)

    def __post_init__(self) -> None:
        self.value = SCALE * self.count


class Meta(type):
    """Makes instances in a way of its own."""

    def __call__(cls, *args: Any) -> Any:
        found = super().__call__(*args)
        found.value = SCALE
        return found


class OfMeta(metaclass=Meta):
    """A class of it."""

    value: float


class Subclassed:
    """Reads a variable when another class is made of it."""

    value: float

    def __init_subclass__(cls) -> None:
        cls.value = SCALE


def _subclass() -> type[Subclassed]:
    class Inner(Subclassed):
        """Made while the model runs."""

    return Inner


class Temporary(nn.Module):
    """A module that a forward makes for its own use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = SCALE

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Model(nn.Module):
    """Computes with what it is given."""

    run: Any

    def __init__(self, **given: Any) -> None:
        super().__init__()
        vars(self).update(given)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def model_of(run: Callable[[Any, Tensor], Any]) -> Model:
    """A model whose own constructor reads nothing."""
    held = {"constructed": Constructed(), "post": Post(2), "kind": Constructed, "kinds": {"a": Constructed}}
    return Model(run=run, **held)


def _other_init(self: Any) -> None:
    self.value = 7.0


def _other_new(cls: Any) -> Any:
    found = object.__new__(cls)
    found.value = 7.0
    return found


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "two functions call two methods of one object": lambda _, x: by_second(by_first(x)),
    "a method calls another": lambda _, x: x * SETTINGS.through(),
    "a method is a base's": lambda _, x: by_first(x) * SETTINGS.inherited(),
    "a method calls the one that it covers": lambda _, x: x * COVERING.second(),
    "an object is an argument": lambda _, x: by_argument(x, SETTINGS),
    "an object is made": lambda _, x: by_argument(x, Settings()),
    "an object is returned": lambda _, x: x * made().second(),
    "an object holds another": lambda _, x: x * OUTER.through(),
    "an object that is made holds another": lambda _, x: x * Outer().through(),
    "an operator": lambda _, x: SETTINGS + x,
    "a length": lambda _, x: x * len(SETTINGS),
    "a truth": lambda _, x: x * (5 if SETTINGS else 3),
    "a membership": lambda _, x: x * (5 if 1 in SETTINGS else 3),
    "a constructor": lambda _, x: x * Constructed().value,
    "a constructor before there is an instance": lambda _, x: x * New().value,
    "a constructor that fills slots": lambda _, x: x * Slotted().value,
    "what a data class calls": lambda _, x: x * Post().value,
    "a data class is made of another": lambda self, x: x * replace(self.post, count=3).value,
    "a factory of a class": lambda _, x: x * Constructed.make().value,
    "a factory of a class by an instance": lambda self, x: x * self.constructed.make().value,
    "a factory that is a function": lambda self, x: x * self.constructed.make_one().value,
    "another of its type": lambda self, x: x * self.constructed.another().value,
    "another of its class": lambda self, x: x * self.constructed.one_more().value,
    "a class that the model holds": lambda self, x: x * self.kind().value,
    "a class that a dictionary holds": lambda self, x: x * self.kinds["a"]().value,
    "a metaclass": lambda _, x: x * OfMeta().value,
    "a class that is made of another": lambda _, x: x * _subclass().value,
    "a module that is made": lambda _, x: Temporary()(x),
}


@pytest.mark.parametrize("run", WAYS.values(), ids=WAYS)
def test_variables_of_functions_that_ran_are_compared(
    run: Callable[[Any, Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever calls them, and whether or not a name leads there."""
    model = model_of(run)
    program, before = whence.capture(model, (X,)), model(X)
    assert program.check(model, (X,)) == []
    monkeypatch.setattr(HERE, "SCALE", 5.0)
    assert not torch.equal(model(X), before)
    assert "global SCALE" in [violation.guard.what for violation in program.check(model, (X,))]


def test_a_method_is_of_the_class_that_it_is_found_on() -> None:
    """Of a base where `super()` alone finds it, and else of what it was called of."""
    found, running, functions = list[Any](), RunningFunctions(lambda _: True), FunctionTracer()
    codes = [Settings.second.__code__, Base.inherited.__code__]

    def met(frame: FrameType) -> bool:
        found.extend([running.running_in(frame).owner] if frame.f_code in codes else [])
        return False

    with functions.seen_by(met):
        (COVERING.second(), SETTINGS.second(), COVERING.inherited())
    assert found == [Settings, Settings, Covering]


class Put(NamedTuple):
    """What is put in the place of a thing that a class holds."""

    run: Callable[[Any, Tensor], Any]
    owner: type
    name: str
    value: Any


PUT = {
    "an attribute of a class": Put(WAYS["a constructor"], Constructed, "step", 3.0),
    "a constructor": Put(WAYS["a constructor"], Constructed, "__init__", _other_init),
    "a constructor that a factory calls": Put(
        WAYS["a factory of a class"], Constructed, "__init__", _other_init
    ),
    "a constructor of a type": Put(WAYS["another of its type"], Constructed, "__init__", _other_init),
    "a constructor before an instance": Put(
        WAYS["a constructor before there is an instance"], New, "__new__", _other_new
    ),
    "what a data class calls": Put(WAYS["what a data class calls"], Post, "__post_init__", _other_init),
    "a method that a method calls": Put(WAYS["a method calls another"], Settings, "second", lambda _: 7.0),
    "a method that is covered": Put(
        WAYS["a method calls the one that it covers"], Settings, "second", lambda _: 7.0
    ),
    "an operator": Put(WAYS["an operator"], Settings, "__add__", lambda _, x: x + 7),
    "a length": Put(WAYS["a length"], Settings, "__len__", lambda _: 7),
    "a forward": Put(WAYS["a module that is made"], Temporary, "forward", lambda _, x: x * 7),
}


@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
def test_methods_that_ran_are_compared(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the class of what they were called of, which may have another one later."""
    model = model_of(put.run)
    program, before = whence.capture(model, (X,)), model(X)
    assert program.check(model, (X,)) == []
    monkeypatch.setattr(put.owner, put.name, put.value)
    assert not torch.equal(model(X), before)
    assert program.check(model, (X,)) != []


class Dated(nn.Module):
    """Reads variables, and a clock, when it is made, and neither in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.made = datetime.now().year > 1
        self.linear = nn.Linear(3, int(SCALE))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class AroundDated(nn.Module):
    """Has one that was made before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Dated()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if isinstance(self.inner, Dated) else x


@pytest.mark.parametrize("kind", [Dated, AroundDated])
def test_constructors_that_did_not_run_count_for_nothing(
    kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model was made before it is captured: what that took is nothing that its forward reads."""
    model = kind()
    program = whence.capture(model, (X,))
    assert program.verify(model, (X,)).ok
    monkeypatch.setattr(HERE, "SCALE", 5.0)
    assert program.check(model, (X,)) == []


def unused(x: Tensor) -> Tensor:
    """What is called on another way alone."""
    return x * SCALE


def test_functions_that_did_not_run_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leads there is compared, and not what is read there."""
    model = model_of(lambda self, x: x if self.training else unused(x))
    program = whence.capture(model, (X,))
    monkeypatch.setattr(HERE, "SCALE", 5.0)
    assert program.check(model, (X,)) == []
    assert program.check(model.eval(), (X,)) != []
