"""Models of any depth and length."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.randn(2, 3)
DEEP = 200


def nested(depth: int) -> nn.Module:
    model: nn.Module = nn.Linear(3, 3)
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


def total(output: Tensor) -> Tensor:
    return output.sum()


@pytest.mark.parametrize("depth", [DEEP // 5, pytest.param(DEEP, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("backward", [False, total])
def test_nested_modules(backward: bool | Callable[[Tensor], Tensor], depth: int) -> None:
    """Modules nested almost as deep as eager can call them: captured, called, checked, shown."""
    model, limit = nested(depth), sys.getrecursionlimit()
    program = whence.capture(model, (X,), backward=backward)
    assert sys.getrecursionlimit() == limit
    assert program.check(model, (X,)) == []
    for made in (program.module(), program.unflatten()):
        result = made(X)[1] if backward else made(X)
        assert torch.equal(result, model(X))
    assert str(program.calls).count("\n") == depth


def test_limit_of_calls_after_a_failure() -> None:
    """A model that calls itself for ever fails as it does in eager, and Python's limit is as before."""

    def forward(x: Tensor) -> Tensor:
        return forward(x) + 1

    limit = sys.getrecursionlimit()
    with pytest.raises(RecursionError) as caught:
        whence.capture(forward, (X,))
    assert sys.getrecursionlimit() == limit
    assert "sys.setrecursionlimit(" in caught.value.__notes__[-1]


def test_chain_of_modules() -> None:
    """A thousand modules one after the other."""
    model = nn.Sequential(*(nn.ReLU() if number % 2 else nn.Identity() for number in range(1000)))
    tree = whence.capture(model, (X,)).unflatten()
    assert torch.equal(tree(X), model(X))
