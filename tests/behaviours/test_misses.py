"""Changes that are easily missed, and things that are easily taken for changes: each was, once."""

import array
import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

import whence
from tests.checks import same_bits

X = torch.ones(4, 4)


class Holding(nn.Module):
    """Computes something with one value that it holds."""

    def __init__(self, run: Callable[[Any, Tensor], Any], value: object = None) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.run = run
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Factor:
    """A callable object with a number."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def __call__(self, *given: Any) -> Any:
        return given[-1] * self.factor

    def method(self, x: Tensor) -> Tensor:
        """Another way to it."""
        return x * self.factor


class Plain:
    """An object that lacks what it is asked for."""


@dataclass(slots=True)
class Slotted:
    """A config without a dictionary."""

    items: list[float] = field(default_factory=lambda: [2.0])
    table: dict[str, float] = field(default_factory=lambda: {"a": 2.0})
    tensor: Tensor = field(default_factory=lambda: X * 2)
    inner: Plain = field(default_factory=Plain)


class Word(str):
    """A text of its own class."""


def _times(self: Any, x: Tensor) -> Tensor:
    return x * self.value


def _first(self: Any, x: Tensor) -> Tensor:
    return x * self.value[0]


def _called(self: Any, x: Tensor) -> Tensor:
    result: Tensor = self.value(x)
    return result


def _of_mode(self: Any, x: Tensor) -> Tensor:
    return x * (2 if self.child.training else 1)


def _of_flag(self: Any, x: Tensor) -> Tensor:
    return x * getattr(self.value, "flag", 1.0)


def _of_text(self: Any, x: Tensor) -> Tensor:
    return x * len(str(self.value))


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.value, name, value)


def _put(value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, "value", value)


def _in_list(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: change(model.value)


MISSED: dict[str, tuple[Callable[[Any, Tensor], Any], Any, Callable[[Any], Any]]] = {
    "tensor in a list": (_first, lambda: [X], _in_list(lambda v: v.__setitem__(0, X * 7))),
    "module in a list": (
        lambda self, x: self.value[0](x),
        lambda: [nn.Linear(4, 4)],
        _in_list(lambda v: v.__setitem__(0, nn.Linear(4, 4))),
    ),
    "weight of a module in a list": (
        lambda self, x: self.value[0](x),
        lambda: [nn.Linear(4, 4)],
        _in_list(lambda v: setattr(v[0], "weight", nn.Parameter(torch.ones(4, 4)))),
    ),
    "mode of a child that is not called": (_of_mode, lambda: None, lambda m: m.child.eval()),
    "attribute that an object lacked": (_of_flag, Plain, _set("flag", 3.0)),
    "number in a callable object": (_called, Factor, _set("factor", 3.0)),
    "number behind a bound method": (
        _called,
        lambda: Factor().method,
        lambda m: setattr(m.value.__self__, "factor", 3.0),
    ),
    "method of another object": (_called, lambda: Factor().method, _put(Factor(3.0).method)),
    "path": (_of_text, lambda: Path("a"), _put(Path("abc"))),
    "array": (lambda self, x: x * float(self.value[0]), lambda: np.ones(2), _put(np.zeros(2))),
    "item of an array": (
        lambda self, x: x * self.value[0],
        lambda: array.array("d", [1.0]),
        _in_list(lambda v: v.__setitem__(0, 2.0)),
    ),
    "namespace": (lambda self, x: x * self.value.k, lambda: SimpleNamespace(k=2.0), _set("k", 3.0)),
    "namespace in a dict": (
        lambda self, x: x * self.value["a"].k,
        lambda: {"a": SimpleNamespace(k=2.0)},
        lambda m: setattr(m.value["a"], "k", 3.0),
    ),
    "timedelta": (
        lambda self, x: x * self.value.total_seconds(),
        lambda: timedelta(seconds=2),
        _put(timedelta(seconds=3)),
    ),
    "text of its own class": (_of_text, lambda: Word("a"), _put(Word("abc"))),
    "set of tuples": (_of_text, lambda: {(1, 2)}, _put({(1, 2, 3)})),
    "list in a slot": (lambda self, x: x * self.value.items[0], Slotted, _set("items", [3.0])),
    "item of a list in a slot": (
        lambda self, x: x * self.value.items[0],
        Slotted,
        _in_list(lambda v: v.items.__setitem__(0, 3.0)),
    ),
    "entry of a dict in a slot": (
        lambda self, x: x * self.value.table["a"],
        Slotted,
        _in_list(lambda v: v.table.__setitem__("a", 3.0)),
    ),
    "tensor in a slot": (lambda self, x: x * self.value.tensor, Slotted, _set("tensor", X * 7)),
    "attribute behind a slot": (
        lambda self, x: x * getattr(self.value.inner, "flag", 2.0),
        Slotted,
        _in_list(lambda v: setattr(v.inner, "flag", 3.0)),
    ),
    "defaults of a function": (
        lambda self, x: self.value(x),
        lambda: _with_default(2.0),
        lambda m: setattr(m.value, "__defaults__", (3.0,)),
    ),
    "gradient of a parameter": (
        lambda self, x: self.child(x) * (2.0 if self.child.weight.grad is None else 3.0),
        lambda: None,
        lambda m: setattr(m.child.weight, "grad", torch.ones_like(m.child.weight)),
    ),
    "code of a function": (
        lambda self, x: self.value(x),
        lambda: _with_default(2.0),
        lambda m: setattr(m.value, "__code__", (lambda x, by=2.0: x + by).__code__),
    ),
}


def _with_default(factor: float) -> Callable[..., Tensor]:
    def scaled(x: Tensor, by: float = factor) -> Tensor:
        return x * by

    return scaled


@pytest.mark.parametrize("name", MISSED)
def test_change_is_found(name: str) -> None:
    """What is fine is not told of; the change, which matters, is."""
    run, make, change = MISSED[name]
    torch.manual_seed(0)
    model = Holding(run, make())
    program = whence.capture(model, (X,))
    assert list(map(str, program.check(model, (X,)))) == []
    before = model(X)
    assert list(map(str, program.check(model, (X,)))) == []
    change(model)
    assert not same_bits(model(X), before)  # the change matters
    assert program.check(model, (X,)) != []


@pytest.mark.parametrize("name", [name for name in MISSED if name != "module in a list"])
def test_another_instance_alike_is_fine(name: str) -> None:
    """An instance made in the same way is not told of."""
    run, make, _ = MISSED[name]
    torch.manual_seed(0)
    program = whence.capture(Holding(run, make()), (X,))
    torch.manual_seed(0)
    assert list(map(str, program.check(Holding(run, make()), (X,)))) == []
    assert list(map(str, program.check(copy.deepcopy(Holding(run, make())), (X,)))) == [] or "list" in name


def test_tensor_attribute_is_taken_from_the_model() -> None:
    """A tensor under a name of a module may be replaced: the program is given the one that is there."""
    model = Holding(_times, torch.full((4,), 2.0))
    guarded = whence.capture(model, (X,)).guarded(model)
    assert same_bits(guarded(X), model(X))
    model.value = torch.full((4,), 7.0)
    assert same_bits(guarded(X), model(X))
    other = Holding(_times, torch.full((4,), 9.0))
    assert same_bits(guarded.program.guarded(other)(X), other(X))  # type: ignore[attr-defined]


def test_hook_objects_are_looked_into() -> None:
    """A hook may be an object, with numbers of its own."""
    model = nn.Sequential(nn.Linear(4, 4))
    hook = Factor()
    model[0].register_forward_hook(hook)
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    assert program.check(copy.deepcopy(model), (X,)) == []
    hook.factor = 3.0
    assert len(program.check(model, (X,))) == 1


PROGRESS = """
import torch, whence
from torch import nn
from tqdm import tqdm

class Slow(nn.Linear):
    def forward(self, x):
        for _ in tqdm(range(2)):
            x = super().forward(x)
        return x

model, x = Slow(4, 4), torch.ones(2, 4)
assert whence.capture(model, (x,)).verify(model, (x,)).ok
"""


@pytest.mark.sweep
def test_a_progress_bar_is_no_clock_of_the_models() -> None:
    """It looks at one for itself; in a process of its own, whose output nobody has replaced."""
    subprocess.run([sys.executable, "-c", PROGRESS], check=True)


def test_forward_of_a_parent_class() -> None:
    """A forward reached through super() is watched on its class."""

    class Parent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Child(Parent):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = Child()
    program = whence.capture(model, (X,))
    Parent.forward = lambda self, x: x * 3  # type: ignore[method-assign]
    assert [violation.guard.what for violation in program.check(model)] == ["Parent.forward"]


def test_kernels_and_modes_of_torch() -> None:
    """Which attention kernels are allowed, and who sees every operation."""

    class Mine(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    program = whence.capture(nn.Linear(4, 4), (X,))
    with sdpa_kernel(SDPBackend.MATH):
        assert [v.guard.what for v in program.check(nn.Linear(4, 4))] == ["attention kernels"]
    with Mine():
        assert [v.guard.what for v in program.check(nn.Linear(4, 4))] == ["modes of torch"]


class Asking(nn.Module):
    """Asks for inference mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.is_inference_mode_enabled() else x


def test_inference_mode_where_it_is_asked_for() -> None:
    """It is no other than `no_grad` to code that does not ask."""
    with torch.no_grad():
        asking, other = whence.capture(Asking(), (X,)), whence.capture(nn.Linear(4, 4), (X,))
    with torch.inference_mode():
        assert [v.guard.what for v in asking.check(Asking())] == ["inference mode"]
        assert other.check(nn.Linear(4, 4)) == []


class Counting(nn.Module):
    """Changes what it reads, and computes nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 1
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(len(self.history))
        self.runs += 1
        return x * 2


def test_side_effects_are_not_left_out() -> None:
    """A model that changes what it reads runs itself: neither numbers nor changes are lost."""
    model, eager = Counting(), Counting()
    guarded = whence.capture(model, (X,)).guarded(model, on_violation="recapture")
    for _ in range(3):
        assert same_bits(guarded(X), eager(X))
        assert (model.runs, model.history) == (eager.runs, eager.history)


def test_parametrized_models_after_a_copy() -> None:
    """Copying leaves a note in a class that parametrization made."""
    one, other = (parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(2))
    program = whence.capture(one, (X,))
    copy.deepcopy(one)
    assert list(map(str, program.check(other, (X,)))) == []


def test_cached_property() -> None:
    """A value computed once is what the first run leaves."""

    class Cached(nn.Module):
        @functools.cached_property
        def factor(self) -> float:
            return 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    model = Cached()
    program = whence.capture(model, (X,))
    assert "factor" not in vars(model)
    assert program.check(model, (X,)) == []
    model(X)
    assert list(map(str, program.check(model, (X,)))) == []
    model.factor = 3.0
    assert len(program.check(model, (X,))) == 1


def test_replaced_recurrent_weights() -> None:
    """A recurrent layer keeps weak references to its weights, which come and go with them."""
    model = nn.LSTM(4, 4)
    program = whence.capture(model, (X,))
    model.weight_ih_l0 = nn.Parameter(torch.ones(16, 4))
    assert list(map(str, program.check(model, (X,)))) == []


def test_containers_that_lead_to_each_other() -> None:
    """Dictionaries in a circle are described once each."""
    nodes: list[dict[str, Any]] = [{} for _ in range(8)]
    for node in nodes:
        node["next"] = nodes
    model = Holding(lambda self, x: x * len(self.value), nodes)
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    assert len(str(program.guards)) < 5000
    nodes.append({})
    assert len(program.check(model, (X,))) == 1


def test_tensors_of_other_layouts() -> None:
    """Sparse, nested and uninitialised tensors are told from dense ones, in words."""
    program = whence.capture(nn.ReLU(), (X,))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for other in (X.to_sparse(), nested, nn.UninitializedParameter()):
        (violation,) = program.check(nn.ReLU(), (other,))
        assert violation.found != str(violation.guard.expected)


def test_half_made_modules() -> None:
    """A module whose `__init__` never ran is a violation, not an error."""
    program = whence.capture(nn.Linear(4, 4), (X,))
    assert program.check(nn.Linear.__new__(nn.Linear)) != []
    broken = nn.Linear(4, 4)
    del broken.__dict__["_modules"]
    assert program.check(broken, (X,)) == [] or program.check(broken, (X,))


def test_arguments_that_lead_to_themselves() -> None:
    """A list that holds itself has no structure."""
    circle: list[Any] = []
    circle.append(circle)
    assert len(whence.capture(nn.ReLU(), (X,)).check(nn.ReLU(), (circle,))) == 1


class Looks:
    """A descriptor that finds its value in what the instance holds."""

    def __get__(self, held: Any, _kind: object = None) -> Any:
        return 2.0 if held is None else held.__dict__.get("hidden", 2.0)


class LooksItUp(Holding):
    """Finds a number by text among all that it holds."""

    looked_up = Looks()

    @property
    def held(self) -> float:
        return self.__dict__.get("hidden", 2.0)


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: x * m.looked_up,
        lambda m, x: x * m.held,
        lambda m, x: x * vars(m).get("hidden", 2.0),
        lambda m, x: x * m.__dict__.get("hidden", 2.0),
    ],
    ids=["descriptor", "property", "vars", "dictionary"],
)
def test_attributes_among_all(run: Callable[[Any, Tensor], Any]) -> None:
    """An attribute that code takes out of `__dict__` by a text is guarded, whether it was there or not."""
    model: Any = LooksItUp(run)
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    model.hidden = 5.0
    assert [violation.guard.what for violation in program.check(model, (X,))] == ["hidden"]
    program = whence.capture(model, (X,))
    assert program.check(model, (X,)) == []
    model.hidden = 2.0
    assert [violation.guard.what for violation in program.check(model, (X,))] == ["hidden"]


class Ordered(nn.Module):
    """Calls two layers that are alike, as a container of its own says."""

    def __init__(self, keep: Callable[[nn.Module, nn.Module], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.parts = keep(self.first, self.second)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)

    def call(self, x: Tensor) -> Tensor:
        """Read before any of the layers."""
        first, second = self.parts.values() if isinstance(self.parts, dict) else self.parts
        result: Tensor = second(first(x).relu())
        return result


@pytest.mark.parametrize(
    "keep",
    [lambda a, b: (a, b), lambda a, b: [a, b], lambda a, b: {"one": a, "two": b}],
    ids=["tuple", "list", "dict"],
)
def test_modules_that_change_places(keep: Callable[[nn.Module, nn.Module], Any]) -> None:
    """Which of two modules that are alike a container holds where is what the model computes."""
    model = Ordered(keep)
    program = whence.capture(model, (X,))
    assert program.check(copy.deepcopy(model), (X,)) == []
    model.parts = keep(model.second, model.first)
    assert [violation.guard.what for violation in program.check(model, (X,))] == ["parts"]
    with pytest.raises(whence.StaleCapture):
        program.bind(model)(X)


def test_two_modules_that_become_one() -> None:
    """Which of two modules that are alike is which the model may ask."""
    model = Holding(lambda m, x: m.child(x).sin() if m.first is m.second else m.second(m.first(m.child(x))))
    model.first, model.second = nn.ReLU(), nn.ReLU()
    program = whence.capture(model, (X,))
    assert program.check(copy.deepcopy(model), (X,)) == []
    model.second = model.first
    (violation,) = program.check(model, (X,))
    assert violation.guard.what == "second" and "one with another" in str(violation)
