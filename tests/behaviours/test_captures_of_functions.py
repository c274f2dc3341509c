"""Captures of functions and methods."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import whence

X = torch.ones(2, 4)


class Pair(nn.Module):
    """A module that is also known by another name outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result

    def twice(self, x: Tensor) -> Tensor:
        """A method other than forward."""
        result: Tensor = self.inner(self.inner(x))
        return result


def made(pair: Pair, inner: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function around a module and a part of it."""

    def run(x: Tensor) -> Tensor:
        result: Tensor = inner(pair(x))
        return result

    return run


def _found(program: whence.Program, call: object) -> list[str]:
    return [violation.guard.what for violation in program.check(call, (X,))]


def test_function_around_a_module_and_its_part() -> None:
    """The part has two names: it must stay one module."""
    pair = Pair()
    program = whence.capture(made(pair, pair.inner), (X,))
    assert _found(program, made(pair, pair.inner)) == []
    other = Pair()
    assert _found(program, made(other, other.inner)) == []
    (what,) = _found(program, made(other, nn.Linear(4, 4)))
    assert what == "inner and pair.inner"
    other.inner.eval()
    assert _found(program, made(other, other.inner)) == ["inner.training"]


def test_another_function() -> None:
    """A function of other code is not what was captured."""
    pair = Pair()
    program = whence.capture(made(pair, pair.inner), (X,))
    assert _found(program, lambda x: x)[0].endswith("made.<locals>.run")
    assert _found(program, pair)[0].endswith("made.<locals>.run")
    assert _found(program, 3)[0].endswith("made.<locals>.run")


def test_method_of_a_module() -> None:
    """A method is guarded with the module it belongs to."""
    pair = Pair()
    program = whence.capture(pair.twice, (X,))
    assert _found(program, pair.twice) == []
    assert _found(program, Pair().twice) == []
    assert _found(program, pair.forward) == ["Pair.twice"]
    pair.inner.eval()
    assert _found(program, pair.twice) == ["inner.training"]


def test_partial_of_a_function() -> None:
    """What a partial fixes is part of what was captured."""

    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    program = whence.capture(functools.partial(scaled, by=2.0), (X,))
    assert _found(program, functools.partial(scaled, by=2.0)) == []
    assert len(_found(program, functools.partial(scaled, by=3.0))) == 1


def test_wrappers_are_seen_through() -> None:
    """A compiled model, or one with compiled parts, is what is inside; a hook on a wrapper is not."""
    part: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    inner = nn.Sequential(part, nn.ReLU())
    compiled: Any = torch.compile(inner, backend="eager")
    program = whence.capture(compiled, (X,))
    assert _found(program, compiled) == []
    assert _found(program, inner) == []
    inner[1].eval()
    assert _found(program, compiled) == ["1.training"]
    inner[1].train()
    handle = inner[0].register_forward_hook(lambda *_: None)
    assert _found(program, compiled) == ["hooks of 0"]
    program = whence.capture(compiled, (X,))
    assert _found(program, compiled) == []
    handle.remove()
    assert _found(program, compiled) == ["hooks of 0"]
