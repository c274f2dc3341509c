"""Numbers that Python and NumPy draw, or read off a clock, as operations of a program: each run draws where
eager draws.

A number is drawn when the model asks for it, and is a node. What draws an element of a sequence, or an order,
is written down as the drawing of places.
"""

import importlib
import json
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NUMBERS_OF_PYTHON = (
    *("random", "uniform", "randint", "randrange", "getrandbits", "gauss", "normalvariate", "triangular"),
    *("betavariate", "expovariate", "gammavariate", "lognormvariate", "paretovariate", "vonmisesvariate"),
    *("weibullvariate", "binomialvariate"),
)
_PLACES_OF_PYTHON = ("choice", "choices", "sample", "shuffle")
_NUMBERS_OF_NUMPY = (
    *("rand", "random", "random_sample", "ranf", "sample", "uniform", "randint", "randn", "normal"),
    *("standard_normal", "beta", "binomial", "exponential", "standard_exponential", "gamma", "poisson"),
    *("laplace", "lognormal", "triangular", "geometric", "chisquare", "choice"),
)
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_ALLOWED = frozenset(
    (
        *(f"time.{name}{unit}" for name in _CLOCKS for unit in ("", "_ns")),
        *(f"random.{name}" for name in (*_NUMBERS_OF_PYTHON, *_PLACES_OF_PYTHON)),
        *(f"numpy.random.{name}" for name in _NUMBERS_OF_NUMPY),
    )
)
_LARGEST = 2**62
_RANGE = "places"


@dataclass(frozen=True)
class HostDraw:
    """A call of a function that draws; `finished` makes of the numbers what the model is given."""

    function: str
    arguments: str
    finished: Callable[[Any], Any]

    def by(self, function: Callable[..., Any]) -> Any:
        """Draw now, with the function itself: a number, or a list of whole ones."""
        return _number_computed(function, self.arguments)

    @property
    def spelled(self) -> str:
        """As a person writes the call."""
        return _call_in_words(self.function, self.arguments)


def draw_of(function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> HostDraw | None:
    """The call as one that gives numbers; None where a program cannot hold it."""
    if function not in _ALLOWED:
        return None
    finished: Callable[[Any], Any] = _itself
    name = function.rpartition(".")[2]
    if args and name in _PLACES_OF_PYTHON and isinstance(args[0], Sequence):
        sequence, args = args[0], ({_RANGE: len(args[0])}, *args[1:])
        finished = _finishing(name, sequence)
    try:
        return HostDraw(function, json.dumps([list(args), dict(kwargs)]), finished)
    except (TypeError, ValueError):
        return None


def are_whole_or_one(found: Any) -> bool:
    """Whether a draw gave what a program can hold: a number, or a list of whole ones."""
    if type(found) is list:
        return all(type(each) is int and abs(each) < _LARGEST for each in found)
    return type(found) is float or (type(found) is int and abs(found) < _LARGEST)


@torch.library.custom_op("whence::drawn", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _drawn_by_function(function: str, arguments: str, whole: bool, count: int) -> Tensor:  # noqa: ARG001
    """What the function draws: `count` numbers, or one without a dimension where that is negative."""
    return as_tensor(_number_computed(_function_named(function), arguments), whole=whole)


@_drawn_by_function.register_fake
def _shape_of_drawn(function: str, arguments: str, whole: bool, count: int) -> Tensor:  # noqa: ARG001
    return torch.empty(() if count < 0 else (count,), dtype=torch.int64 if whole else torch.float64)


DRAWN = torch.ops.whence.drawn.default
"""Draws from the generator of Python's or of NumPy's; there is one of each in a process."""


def as_tensor(found: Any, *, whole: bool) -> Tensor:
    """Numbers as the operator gives them."""
    return torch.tensor(found, dtype=torch.int64 if whole else torch.float64)


def spelled_number(node: Any) -> str:
    """The number that is read from a node, as a person writes it."""
    if node.target is DRAWN:
        return _call_in_words(str(node.args[0]), str(node.args[1]))
    return f"{node}.item()"


def _function_named(name: str) -> Callable[..., Any]:
    if name not in _ALLOWED:
        raise ValueError(f"{name} draws no numbers")
    module, _, called = name.rpartition(".")
    return getattr(importlib.import_module(module), called)  # type: ignore[no-any-return]


def _number_computed(function: Callable[..., Any], arguments: str) -> Any:
    args, kwargs = json.loads(arguments, object_hook=_as_range)
    if function.__name__ == "shuffle":
        order: list[int] = list(*args)
        function(order)
        return order
    found = function(*args, **kwargs)
    return found.item() if getattr(found, "shape", None) == () else found


def _as_range(held: dict[str, Any]) -> Any:
    return range(held[_RANGE]) if held.keys() == {_RANGE} else held


def _call_in_words(function: str, arguments: str) -> str:
    args, kwargs = json.loads(arguments, object_hook=_as_range)
    shown = [*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())]
    return f"{function}({', '.join(shown)})"


def _finishing(name: str, sequence: Sequence[Any]) -> Callable[[Any], Any]:
    """What becomes of drawn places in a sequence."""

    def one(place: Any) -> Any:
        return sequence[place]

    def several(places: Any) -> list[Any]:
        return [sequence[place] for place in places]

    def in_place(places: Any) -> None:
        held: MutableSequence[Any] = sequence  # type: ignore[assignment]
        held[:] = several(places)

    return {"choice": one, "shuffle": in_place}.get(name, several)


def _itself(found: Any) -> Any:
    return found
