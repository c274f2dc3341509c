"""Containers among the arguments that a model changes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure

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


def adds_a_key(given: dict[str, Tensor]) -> Any:
    given["y"] = given.pop("x") + 1
    return given["y"] * 2, given


def appends(given: list[Tensor]) -> Any:
    given.append(given[0] + 1)
    return {"result": given[-1] * 2, "given": given}


def replaces_in_a_dataclass(given: Batch) -> Any:
    given.x, given.count = given.x + 1, given.count + 1
    return given.x * 2, [given]


def tensors(given: Any) -> list[Tensor]:
    return [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf) for leaf in tree_leaves(given)]


RETURNED: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "a dictionary": (adds_a_key, lambda: {"x": torch.ones(2, requires_grad=True)}),
    "a list": (appends, lambda: [torch.ones(2, requires_grad=True)]),
    "a dataclass": (replaces_in_a_dataclass, lambda: Batch(torch.ones(2, requires_grad=True))),
}


@pytest.mark.parametrize(("body", "make"), RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("backward", [False, True, lambda outputs: tree_leaves(outputs)[0].sum()])
def test_a_container_that_is_returned_is_changed(
    body: Callable[[Any], Any], make: Callable[[], Any], backward: Any
) -> None:
    """Module, tree and bound program change the one that was given, and give it back."""
    model = Doing(body)
    program = whence.capture(model, (make(),), backward=backward)
    expected = make()
    model(expected)
    bound = [] if backward is True else [program.bind(model)]
    for run in (program.module(), program.unflatten(), *bound):
        given = make()
        result = run(given=given)
        result = result[1] if callable(backward) else result
        parts = result.values() if isinstance(result, dict) else result
        assert any(given is part or (isinstance(part, list) and given is part[0]) for part in parts)
        assert tree_structure(given) == tree_structure(expected)
        assert all(map(torch.equal, *map(tensors, (given, expected))))
    if backward is not True:
        assert program.verify(model, (make(),)).ok


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
