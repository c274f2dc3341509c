"""Containers among the arguments that a model changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence


@dataclass
class Batch:
    """Registered with pytree."""

    x: Tensor
    count: int = 3


torch.export.register_dataclass(Batch)


class Doing(nn.Module):
    """Does something with what it is given."""

    def __init__(self, body: Callable[[Any], Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, given: Any) -> Any:
        """The body's result."""
        return self.body(given)


def counts(given: Batch) -> Tensor:
    given.count += 1
    return given.x * given.count


def replaces(given: dict[str, Any]) -> Tensor:
    given["x"] = given["x"] + 1
    given["new"] = 3
    return given["x"] * 2


def pops(given: list[Any]) -> Tensor:
    inner = given[0]
    inner["gone"] = inner.pop("x")
    return inner["gone"] * 2


def fills(given: dict[int, Any]) -> Tensor:
    given.update({number: number for number in range(9)})
    return given[9] * 2


X = torch.ones(2)
CHANGES: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "a number in a dataclass": (counts, Batch(X), "changes what `args[0]` holds: .count is another"),
    "a tensor and a key": (
        replaces,
        {"x": X},
        "changes what `args[0]` holds: ['x'] is another, ['new'] is new",
    ),
    "much": (fills, {9: X}, "[0] is new, [1] is new, [2] is new, [3] is new, and 5 more"),
    "inside another": (
        pops,
        [{"x": X}, 1],
        "changes what `args[0][0]` holds: ['gone'] is new, ['x'] is gone",
    ),
}


@pytest.mark.parametrize(("body", "given", "words"), CHANGES.values(), ids=CHANGES)
def test_a_changed_container_is_named(body: Callable[[Any], Any], given: Any, words: str) -> None:
    """Eager changes the caller's container and a program would not: that is said, and nothing is changed."""
    before = repr(given)
    with pytest.raises(whence.SideEffect) as caught:
        whence.capture(Doing(body), (given,))
    assert words in str(caught.value)
    assert "copy of it, or return it" in str(caught.value)
    assert repr(given) == before


def test_a_container_that_is_returned_comes_back_changed() -> None:
    """What it holds are results of the program."""

    def body(given: dict[str, Tensor]) -> Any:
        given["y"] = given["x"] + 1
        return given["y"] * 2, given

    program = whence.capture(Doing(body), ({"x": X},))
    _, returned = program.module()({"x": X})
    assert torch.equal(returned["y"], X + 1)


def test_a_tensor_that_is_written_is_written() -> None:
    """A write in place is a mutation of the program, and the container holds what it held."""

    def body(given: dict[str, Tensor]) -> Tensor:
        given["x"].add_(1)
        given["x"] = given["x"]
        return given["x"] * 2

    program = whence.capture(Doing(body), ({"x": X.clone()},))
    given = {"x": X.clone()}
    program.module()(given)
    assert torch.equal(given["x"], X + 1)


def test_a_copy_is_the_models_own() -> None:
    """What the remedy says works."""

    def body(given: dict[str, Tensor]) -> Tensor:
        own = dict(given)
        own["x"] = own["x"] + 1
        return own["x"] * 2

    model = Doing(body)
    assert whence.capture(model, ({"x": X},)).verify(model, ({"x": X},)).ok
