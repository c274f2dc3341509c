"""A check never raises, whatever it is given."""

from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import whence


class Options:
    """An object whose comparison cannot be trusted."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> NoReturn:
        raise RuntimeError("do not compare me")

    __hash__ = object.__hash__


class Elementwise:
    """An object that compares as a tensor does."""

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return torch.tensor([True, False])

    __hash__ = object.__hash__


class Slotted:
    """An object without a place for weak references."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Awkward(nn.Module):
    """Holds what is hard to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.options = Options()
        self.elementwise = Elementwise()
        self.slotted = Slotted()
        self.generator = torch.Generator()
        self.table = {"options": self.options, "numbers": (1, 2.0, float("nan"))}

    def forward(self, x: Tensor) -> Tensor:
        scale = self.options.scale
        assert self.elementwise is not None
        assert self.generator is not None
        assert len(self.table) == 2
        result: Tensor = self.linear(x) * scale * self.slotted.scale
        return result


X = torch.ones(2, 3)


@pytest.fixture
def program() -> whence.Program:
    """A capture of an awkward model."""
    return whence.capture(Awkward(), (X,))


@pytest.mark.parametrize(
    "other",
    [
        *(None, 3, "model", object(), nn.Linear(3, 3), nn.ModuleList(), lambda x: x, torch.ones(3)),
        *(Awkward, Awkward().forward, nn.Sequential(Awkward())),
    ],
    ids=lambda other: type(other).__name__,
)
def test_another_thing_than_the_model(program: whence.Program, other: Any) -> None:
    """Anything that is not the model is one violation, of the root."""
    assert [violation.guard.what for violation in program.check(other)] == ["the model"]
    assert [violation.guard.what for violation in program.check(other, (X,))] == ["the model"]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), None),
        ((), {}),
        ((X, X), None),
        ((X,), {"y": X}),
        ((), {"y": X}),
        (((X,),), None),
        (([X],), None),
        ((X,), 5),
        (5, None),
        (X, None),
        ("x", None),
        ({"x": X}, None),
    ],
)
def test_another_structure_of_arguments(program: whence.Program, args: Any, kwargs: Any) -> None:
    """Arguments in another structure are one violation, which shows what came."""
    (violation,) = program.check(Awkward(), args, kwargs)
    assert violation.guard.what == "the arguments"


@pytest.mark.parametrize(
    "leaf",
    [
        *(None, 3, "x", X.double(), X[:1], X.to("meta"), X.clone().requires_grad_(), nn.Linear(3, 3)),
        *(X.to_sparse(), torch.ones(3)),
    ],
    ids=range(10),
)
def test_another_argument(program: whence.Program, leaf: Any) -> None:
    """Another value in the place of a tensor is one violation, which names it."""
    (violation,) = program.check(Awkward(), (leaf,))
    assert violation.guard.what == "args[0]"
    assert "float32[2, 3]" in str(violation)


def test_arguments_may_be_given_by_name(program: whence.Program) -> None:
    """How a call is spelled does not matter."""
    assert program.check(Awkward(), (), {"x": X}) == []


def test_without_arguments_only_the_model_is_looked_at(program: whence.Program) -> None:
    """A check of the model alone says nothing of inputs."""
    assert program.check(Awkward()) == []


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda m: setattr(m.options, "scale", 3.0), "options.scale"),
        (lambda m: setattr(m.slotted, "scale", 3.0), "slotted.scale"),
        (lambda m: setattr(m, "options", Slotted()), "options"),
        (lambda m: setattr(m, "options", Options(2)), "options.scale"),
        (lambda m: delattr(m.options, "scale"), "options.scale"),
        (lambda m: setattr(m, "elementwise", None), "elementwise"),
        (lambda m: setattr(m, "generator", None), "generator"),
        (lambda m: m.table.update(options=3), "table"),
        (lambda m: m.table.update(numbers=(1, 2, float("nan"))), "table"),
        (lambda m: setattr(m, "linear", None), "linear"),
        (lambda m: m._modules.pop("linear"), "linear"),
        (lambda m: m.__dict__.pop("_forward_hooks"), None),
        (lambda m: m.linear.__dict__.pop("training"), "linear.training"),
    ],
    ids=range(13),
)
def test_change_of_what_cannot_be_compared(
    program: whence.Program, change: Any, reported: str | None
) -> None:
    """Objects are looked into by the attributes that were read; their own comparison is never asked."""
    model = Awkward()
    if reported == "linear":
        model.__dict__.pop("linear", None)
    change(model)
    found = [violation.guard.what for violation in program.check(model, (X,))]
    assert found == ([] if reported is None else [reported])


def test_identity_is_used_and_said() -> None:
    """An object that cannot be looked into must be the same one, on the model that was captured."""
    model = Awkward()
    program = whence.capture(model, (X,))
    (guard,) = [guard for guard in program.guards if guard.what == "generator"]
    assert guard.strictness == whence.Strictness.IDENTITY
    assert any("generator" in row.what for row in program.guards.unguarded)
    assert program.check(model, (X,)) == []
    model.generator = torch.Generator()
    assert [violation.guard.what for violation in program.check(model, (X,))] == ["generator"]


def test_an_attribute_that_raises_is_a_violation() -> None:
    """Code of the user that fails while it is looked at ends nothing."""

    class Moody:
        ready = True

        def __getattribute__(self, name: str) -> Any:
            if name == "level" and not object.__getattribute__(self, "ready"):
                raise ValueError("not now")
            return object.__getattribute__(self, name) if name != "level" else 2.0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moody = Moody()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.moody.level

    model = Net()
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    model.moody.ready = False
    (violation,) = program.check(model, (X,))
    assert violation.guard.what == "moody.level"
    assert "not now" in violation.found
