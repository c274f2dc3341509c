"""What no name leads to is found again on the way from the model: what was made inside functions."""

import functools
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import whence
from whence.interop.archive.container import unpacked
from whence.interop.archive.records.reached import at_the_end, reached_from

X = torch.randn(2, 4)


def functions(scale: float) -> tuple[Any, Any]:
    """Two functions, of which one calls the other."""

    def helper(x: Tensor) -> Tensor:
        return x * scale

    def deep(x: Tensor) -> Tensor:
        return helper(x) + 1

    return helper, deep


class Calling(nn.Module):
    """Calls what it is given."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def of_a_class() -> nn.Module:
    factor = [2.0]

    def twice(forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapped(*args: Any) -> Any:
            return forward(*args) * factor[0]

        return wrapped

    class Wrapped(nn.Linear):
        @twice
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    return Wrapped(4, 4)


def of_a_hook() -> nn.Module:
    scale, model = 3.0, nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, result: functions(scale)[0](result))
    return model


def of_an_object() -> nn.Module:
    scales, moved = {"a": 2.0}, torch.ones(4)

    def helper(x: Tensor) -> Tensor:
        return x * scales["a"] + moved

    class Held:
        def __init__(self) -> None:
            self.function = helper

        def __call__(self, x: Tensor) -> Tensor:
            return self.function(x)

    return Calling(Held())


@dataclass
class Pair:
    """Whose constructor is in no file."""

    first: Tensor
    second: Tensor


def paired(x: Tensor) -> Tensor:
    pair = Pair(x, x + 1)
    return pair.first * pair.second


def falling_back(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As libraries decorate functions for which there may be a faster kernel."""
    implementation = function

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        return implementation(*args, **kwargs)

    return wrapped


@falling_back
def clamped(x: Tensor, limits: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    return x.clamp(*limits)


def through_a_decorator(x: Tensor) -> Tensor:
    return clamped(x)


def of_one_name() -> nn.Module:
    """Classes are made for each instance, and have one name."""
    return nn.Sequential(weight_norm(nn.Linear(4, 4)), weight_norm(nn.Linear(4, 4)))


def on_the_instance() -> nn.Module:
    model, (_, deep) = nn.Linear(4, 4), functions(2.0)
    model.forward = lambda x: deep(nn.functional.linear(x, model.weight))  # type: ignore[method-assign, assignment]
    return model


class Switch:
    """Holds a variable of the context, as decorators of libraries do."""

    def __init__(self) -> None:
        self.variable = ContextVar[float | None]("variable", default=None)


SWITCH, ALONE = Switch(), ContextVar[float]("alone", default=2.0)


def switched(x: Tensor) -> Tensor:
    by = SWITCH.variable.get()
    return x * ALONE.get() if by is None else x * by


def test_variables_of_the_context_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a file, and those that an object there holds: what a kept program read is looked up again."""
    model = Calling(switched)
    program = whence.cached(model, (X,), directory=tmp_path)
    after = whence.load(next(tmp_path.glob("*.whence")), model=model)
    assert str(after.guards) == str(program.guards) and after.check(model, (X,)) == []
    for variable in (SWITCH.variable, ALONE):
        token = variable.set(3.0)
        assert ["context variable" in str(each) for each in after.check(model, (X,))] == [True]
        variable.reset(token)  # type: ignore[arg-type]
    monkeypatch.setattr("whence.api.capture", None)
    whence.cached(Calling(switched), (X,), directory=tmp_path)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "function": lambda: Calling(functions(2.0)[0]),
    "two functions": lambda: Calling(functions(2.0)[1]),
    "partial": lambda: Calling(functools.partial(functions(2.0)[1])),
    "default": lambda: Calling(lambda x, _scale=2.0: x * _scale),
    "list": lambda: Calling([functions(2.0)[1]][0]),
    "class": of_a_class,
    "hook": of_a_hook,
    "object": of_an_object,
    "instance": on_the_instance,
    "classes of one name": of_one_name,
    "dataclass": lambda: Calling(paired),
    "default of a decorated function": lambda: Calling(through_a_decorator),
}
OTHERS: dict[type, Any] = {float: 9.0, list: [9.0], dict: {"a": 9.0}}


@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
def test_functions_of_closures_are_compared(made: Callable[[], nn.Module], tmp_path: Path) -> None:
    """On the model of the capture and on another: equal ones are no alarm, and others are none too few."""
    program = whence.capture(model := made(), (X,))
    program.save(tmp_path / "p.whence")
    for live in (model, made()):
        after = whence.load(tmp_path / "p.whence", model=live)
        assert str(after.guards) == str(program.guards) and after.check(live, (X,)) == []
        for cell in [thing for thing, _ in reached_from([(live, ())]) if isinstance(thing, CellType)]:
            held = cell.cell_contents
            if (
                other := OTHERS.get(type(held), held.double() if isinstance(held, Tensor) else None)
            ) is not None:
                cell.cell_contents = other
                assert any("cannot say" not in str(each) for each in after.check(live, (X,)))
                cell.cell_contents = held
        assert after.check(live, (X,)) == []


@pytest.mark.parametrize("beside", [True, False], ids=["beside a model", "alone"])
@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
def test_a_loaded_program_is_saved_in_the_same_words(
    made: Callable[[], nn.Module], beside: bool, tmp_path: Path
) -> None:
    """It says the same of where things are, and its guards find the same."""
    captured = made()  # lives until its program is saved: what no name leads to is found from there
    whence.capture(captured, (X,)).save(tmp_path / "first")
    model = made()
    whence.load(tmp_path / "first", model=model if beside else None).save(tmp_path / "second")
    first, second = (unpacked((tmp_path / name).read_bytes(), name) for name in ("first", "second"))
    assert json.loads(first["program.json"]) == json.loads(second["program.json"])
    again = whence.load(tmp_path / "second", model=model)
    assert again.check(model, (X,)) == []
    for cell in [thing for thing, _ in reached_from([(model, ())]) if isinstance(thing, CellType)]:
        held = cell.cell_contents
        if (other := OTHERS.get(type(held))) is not None:
            cell.cell_contents = other
            assert again.check(model, (X,)) != []
            cell.cell_contents = held


@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
def test_they_are_found_again(
    made: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with them is kept, and used for the next model that is made alike."""
    whence.cached(made(), (X,), directory=tmp_path)
    monkeypatch.setattr("whence.api.capture", None)
    model = made()
    assert torch.equal(whence.cached(model, (X,), directory=tmp_path).module()(X), model(X))


def test_a_way_leads_back() -> None:
    """To the very thing; nowhere where it is gone."""
    model = of_an_object()
    for thing, way in reached_from([(model, ())]):
        assert at_the_end(model, way) is thing
    (way,) = (
        way
        for thing, way in reached_from([(model, ())])
        if isinstance(thing, FunctionType) and way[-1] == "function"
    )
    vars(model.function).clear()
    assert at_the_end(model, way) is not model


def test_nothing_of_the_users_runs_on_the_way() -> None:
    """Descriptors and lookups of one's own are not asked."""

    class Loud:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        @property
        def told(self) -> int:
            raise AssertionError

    vars(model := Calling(None))["function"] = Loud()
    assert any(thing is Loud for thing, _ in reached_from([(model, ())]))
