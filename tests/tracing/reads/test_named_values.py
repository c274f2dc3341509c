"""What code is handed and reads where nobody sees it: namespaces, files, classes, mappings of Python's."""

from __future__ import annotations

from collections import ChainMap, UserDict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.ones(3, 4)
Read = Callable[[Tensor, Any], Tensor]


def by_attribute(x: Tensor, settings: Any) -> Tensor:
    """Reads an attribute of what it is handed."""
    result: Tensor = x * settings.scale
    return result


def by_key(x: Tensor, settings: Any) -> Tensor:
    """Reads an entry of what it is handed."""
    result: Tensor = x * settings["scale"]
    return result


def of_part(x: Tensor, settings: Any) -> Tensor:
    """Hands on a part of what it is handed."""
    return by_attribute(x, settings.part)


def file(scale: float) -> Any:
    """A file of settings."""
    made: Any = ModuleType("settings")
    made.scale = scale
    return made


class Outside(nn.Module):
    """A module that is no part of the model."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale


def error(kind: type[Exception], **held: Any) -> Any:
    """An exception that holds settings; code that reports what it did makes such, too."""
    made = kind()
    vars(made).update(held)
    return made


def other_kind(**held: Any) -> Any:
    """A class of exceptions of a user's."""
    return type("Failed", (ValueError,), held)


def put(settings: Any, scale: float) -> None:
    """Other settings."""
    if isinstance(settings, ChainMap | UserDict):
        settings["scale"] = scale
    else:
        vars(settings).get("part", settings).scale = scale


HANDED = pytest.mark.parametrize(
    ("make", "read"),
    [
        pytest.param(lambda: SimpleNamespace(scale=2.0), by_attribute, id="namespace"),
        pytest.param(lambda: SimpleNamespace(part=SimpleNamespace(scale=2.0)), of_part, id="in a namespace"),
        pytest.param(lambda: file(2.0), by_attribute, id="file"),
        pytest.param(lambda: type("Settings", (), {"scale": 2.0}), by_attribute, id="class"),
        pytest.param(lambda: Outside(2.0), by_attribute, id="module"),
        pytest.param(lambda: error(Exception, scale=2.0), by_attribute, id="exception"),
        pytest.param(lambda: error(other_kind(), scale=2.0), by_attribute, id="exception of a user's"),
        pytest.param(lambda: other_kind(scale=2.0), by_attribute, id="class of exceptions"),
        pytest.param(lambda: error(Exception, part=error(Exception, scale=2.0)), of_part, id="in one"),
        pytest.param(lambda: error(Exception, part=SimpleNamespace(scale=2.0)), of_part, id="held by one"),
        pytest.param(lambda: ChainMap({"scale": 2.0}), by_key, id="chain of mappings"),
        pytest.param(lambda: UserDict(scale=2.0), by_key, id="mapping"),
    ],
)


@HANDED
def test_what_a_function_is_handed_is_compared(make: Callable[[], Any], read: Read) -> None:
    """The forward names it, and another function reads of it."""
    settings = make()

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return read(x, settings)

    model = Model()
    program = whence.capture(model, (X,))
    assert not program.check(model, (X,))
    put(settings, 3.0)
    assert program.check(model, (X,))


@HANDED
def test_what_a_model_hands_on_that_it_holds_is_compared(make: Callable[[], Any], read: Read) -> None:
    """As an attribute of its own, too."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = make()

        def forward(self, x: Tensor) -> Tensor:
            return read(x, self.settings)

    model = Model()
    program = whence.capture(model, (X,))
    assert not program.check(model, (X,))
    put(model.settings, 3.0)
    assert program.check(model, (X,))


@HANDED
def test_what_a_step_hands_on_is_compared(make: Callable[[], Any], read: Read) -> None:
    """A bound step is stale where it reads another number there."""
    settings, model = make(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = read(model(x).sum(), settings)
        loss.backward()
        optimizer.step()
        return loss

    bound = whence.capture_step(step, (X,), model=model, optimizer=optimizer).bind(model, optimizer)
    bound(X)
    put(settings, 3.0)
    with pytest.raises(whence.StaleCapture, match="scale"):
        bound(X)


def counted(settings: Any) -> None:
    """Counts in a file of settings."""
    settings.scale += 1


def test_a_file_that_is_handed_on_is_as_it_was() -> None:
    """What a forward counts there is undone after the capture; a step that counts there is refused."""
    settings, model = file(0.0), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            counted(settings)
            return x * 2

    whence.capture(Counting(), (X,))
    assert settings.scale == 0

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        counted(settings)

    with pytest.raises(whence.UnsupportedStep, match=r"changes .*settings\.scale"):
        whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    assert settings.scale == 0
