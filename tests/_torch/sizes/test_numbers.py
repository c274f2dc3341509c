"""Canaries: numbers that are written down reach PyTorch's operators and come back."""

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import SymFloat, Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from whence._torch.sizes.numbers import (
    Arithmetic,
    RecordedNumber,
    Unknown,
    as_node,
    as_recorded,
    holds_recorded,
    is_recorded,
    without_recorded,
)


class Needed(Exception):
    """The number itself was asked for."""


def recorded() -> tuple[fx.Graph, RecordedNumber]:
    graph = fx.Graph()
    arithmetic = Arithmetic(graph.call_function, lambda node, *_: Needed(node.name))
    return graph, arithmetic.number(graph.placeholder("x"))


class Seen(TorchDispatchMode):
    """Notes the arguments of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.arguments = [*args, *(kwargs or {}).values()]
        return args[0] if func._schema.returns else None


USES: dict[str, Callable[[Tensor, Any], object]] = {
    "add": lambda tensor, number: tensor.add_(tensor, alpha=number),
    "add number": lambda tensor, number: tensor + number,
    "mul": lambda tensor, number: number * tensor,
    "div": lambda tensor, number: tensor / number,
    "mul_": lambda tensor, number: tensor.mul_(number),
    "addcdiv": lambda tensor, number: tensor.addcdiv_(tensor, tensor, value=number),
    "lerp": lambda tensor, number: tensor.lerp_(tensor, number),
    "foreach": lambda tensor, number: torch._foreach_div_([tensor], [number]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_number_reaches_operators(use: Callable[[Tensor, Any], object]) -> None:
    """Wherever an operator takes a number, the dispatcher is given this one."""
    tensor, (_, number) = torch.ones(2), recorded()
    with torch.no_grad(), Seen() as seen:
        use(tensor, number)
    assert holds_recorded(seen.arguments)
    assert not holds_recorded(without_recorded(seen.arguments))


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "arithmetic": lambda x: (1 - 0.9**x) / (x * 2 - 3 // x % 5) + x**0.5 - abs(-x),
    "rounding": lambda x: round(x, 1) + round(x) + math.floor(x) + math.ceil(x) + divmod(x, 2)[1],
    "of integers": lambda x: +x / 2 + 2 / x - x // 3,
}


@pytest.mark.parametrize("compute", OPERATIONS.values(), ids=OPERATIONS)
def test_arithmetic_is_pythons(compute: Callable[[Any], object]) -> None:
    """What is written down computes what Python does."""
    graph, number = recorded()
    graph.output(as_node(compute(number)))
    run = fx.GraphModule({}, graph)
    for value in (0.3, 3.0, 17.25):
        assert run(value) == compute(value)


QUESTIONS: dict[str, Callable[[Any], object]] = {
    **{kind.__name__: kind for kind in (bool, float, int, torch.tensor)},
    "comparison": lambda x: x < 1,
    "equality": lambda x: x == 1,
    "text": lambda x: f"{x}",
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_decisions_are_refused(ask: Callable[[Any], object]) -> None:
    """Whoever needs the number gets the error that was asked for."""
    with pytest.raises(Needed):
        ask(recorded()[1])


def test_number_comes_back_from_cpp() -> None:
    """C++ gives a bare `SymFloat` back, with the object (`node`) behind it."""
    _, number = recorded()
    bare = SymFloat(number.node)
    assert isinstance(as_recorded(bare), RecordedNumber)
    assert as_node(bare) is as_node(number)
    assert is_recorded(bare)
    assert not is_recorded(1.0)
    assert as_recorded(1.0) == as_node(1.0) == 1.0
    assert isinstance(number, float)
    with pytest.raises(Needed):
        hash(number)


def test_unknown_is_a_number_that_is_not_shown() -> None:
    """In the place of a number kernels get one; printed, it says only what it is."""
    assert isinstance(Unknown(1.0), float)
    assert repr(Unknown(1.0)) == "float"
    assert operator.mul(Unknown(1.0), 2) == 2
    with pytest.raises(Needed):
        repr(recorded()[1])


def test_a_profiler_writes_numbers_as_text() -> None:
    """PyTorch's, which notes what operators are given, asks for the text when it stops."""
    tensor, (_, number) = torch.ones(2), recorded()
    with torch.profiler.profile(record_shapes=True) as profiler, Seen():
        USES["add"](tensor, number)
    assert "aten::add_" in {event.name for event in profiler.events() or ()}
