"""What no guard watches is said."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import whence

SCALE = SimpleNamespace(by=2.0)
TABLE = {"a": SCALE}


def test_globals_and_closures_are_named() -> None:
    """Objects from outside, and containers of them, which forward reads; numbers and texts are guarded."""
    bias = [SCALE]

    class Net(nn.Module):
        def helper(self, x: Tensor) -> Tensor:
            return x + TABLE["a"].by

        def forward(self, x: Tensor) -> Tensor:
            return self.helper(torch.sin(x) * SCALE.by + bias[0].by)

    guards = whence.capture(Net(), (torch.ones(2),)).guards
    named = [row.what for row in guards.unguarded]
    assert [name for name in named if name.startswith(("global", "closure"))] == [
        "global SCALE",
        "global TABLE",
    ]
    assert all("Net." in str(row) for row in guards.unguarded if row.what in ("global SCALE", "global TABLE"))


def test_functions_called_from_forward_are_named() -> None:
    """Everybody is told that other functions are not watched."""
    guards = whence.capture(nn.Linear(2, 2), (torch.ones(1, 2),)).guards
    assert "functions called from forward" in [row.what for row in guards.unguarded]


def test_loss_function_is_named() -> None:
    """The loss is kept with the program."""
    x = torch.ones(1, 2)
    guards = whence.capture(nn.Linear(2, 2), (x,), backward=torch.sum).guards
    assert any(row.what.startswith("the loss function") for row in guards.unguarded)


def test_classes_that_find_attributes_their_own_way_are_named() -> None:
    """A __getattribute__ may compute values that no guard sees."""

    class Net(nn.Module):
        def __getattribute__(self, name: str) -> Any:
            return 2.0 if name == "scale" else super().__getattribute__(name)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x * self.scale
            return result

    guards = whence.capture(Net(), (torch.ones(2),)).guards
    assert any("Net" in row.what for row in guards.unguarded)


def test_what_is_read_through_vars_is_named() -> None:
    """Nothing sees which names are taken out of a dictionary."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x * vars(self)["scale"]
            return result

    guards = whence.capture(Net(), (torch.ones(2),)).guards
    assert "vars() of Net" in [row.what for row in guards.unguarded]


class Settings:
    """An object of a class that finds its attributes as all do."""

    def __init__(self) -> None:
        self.scale = 2.0


def test_what_is_read_through_vars_of_an_object_is_named() -> None:
    """As of a module."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x * vars(self.settings)["scale"]
            return result

    guards = whence.capture(Net(), (torch.ones(2),)).guards
    assert "vars() of Settings" in [row.what for row in guards.unguarded]


def test_objects_that_cannot_be_looked_into_are_named_wherever_they_are() -> None:
    """Also inside a container."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = {"generator": torch.Generator()}

        def forward(self, x: Tensor) -> Tensor:
            return x * len(self.parts)

    guards = whence.capture(Net(), (torch.ones(2),)).guards
    assert "the inside of parts, a Generator" in [row.what for row in guards.unguarded]


def test_step_says_what_of_an_object_is_compared() -> None:
    """Attributes of an object around a step are guarded where code names them, and nothing says otherwise."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x) * SCALE.by

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    guards = whence.capture_step(step, (torch.ones(1, 2),), model=model, optimizer=optimizer).guards
    assert guards.about("SCALE.by")
    assert "nothing can watch" not in str(guards)
    assert any(row.what == "global SCALE" and "are compared" in row.why for row in guards.unguarded)
