"""Two programs are one where every run of them computes the same from the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from whence.program.queries.same_operations import same_operations

Function = Callable[[Tensor], Any]


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def branching(then: Function) -> Function:
    return lambda x: torch.cond(x.sum() > 0, then, torch.sin, (x,))


SAME: dict[str, tuple[Function, Function]] = {
    "names": (lambda x: x.exp() + x.sin(), lambda y: y.exp() + y.sin()),
    "not a number": (lambda x: x * float("nan"), lambda x: x * float("nan")),
    "equal tensors": (lambda x: x + torch.tensor([2.0]), lambda x: x + torch.tensor([2.0])),
}
OTHER: dict[str, tuple[Function, Function]] = {
    "another operation": (torch.sin, torch.cos),
    "one more": (torch.sin, lambda x: x.sin().sin()),
    "another value": (lambda x: x.exp() * x.sin(), lambda x: x.exp() * x),
    "another zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    "another tensor": (lambda x: x + torch.tensor([2.0]), lambda x: x + torch.tensor([3.0])),
    "another dtype": (lambda x: x + torch.tensor([2]), lambda x: x + torch.tensor([2.0])),
    "another branch": (branching(torch.exp), branching(torch.cos)),
    "a view of the same": (torch.sin, lambda x: x.sin().view(2, 3)),
    "another result": (lambda x: (x.sin(), 1), lambda x: (x.sin(), 1.0)),
    "another structure": (lambda x: [x.sin()], lambda x: (x.sin(),)),
}


def program(function: Function) -> whence.Program:
    return whence.capture(Calls(function), (torch.ones(2, 3),))


@pytest.mark.parametrize("name", SAME)
def test_one_program(name: str) -> None:
    """Whatever the code behind it is called."""
    one, other = map(program, SAME[name])
    assert same_operations(one, other)


@pytest.mark.parametrize("name", OTHER)
def test_another_program(name: str) -> None:
    """To the last constant, in branches, too."""
    one, other = map(program, OTHER[name])
    assert not same_operations(one, other)
