"""Sizes that vary are used as any number of Python's is."""

import copy
import logging
from collections.abc import Callable
from functools import cache, lru_cache, partial, wraps

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence

Run = Callable[[Tensor], Tensor]
X = torch.randn(4, 3)
SCALES: dict[tuple[int, int], int] = {}


class Sized(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def _telling(x: Tensor) -> Tensor:
    logging.getLogger(__name__).debug(f"{x.shape[0]} rows of {x.shape}")
    assert x.ndim == 2, f"not {x.shape[0]} rows"
    if x.ndim != 2:
        raise ValueError(f"not {x.shape[0]} rows")
    torch._check(x.shape[0] > 0, lambda: f"{x.shape[0]} rows")
    return x * 2


STAY_OPEN: dict[str, Run] = {
    "rest": lambda x: x * divmod(x.shape[0], 3)[1] + divmod(100, x.shape[0])[0],
    "inverted": lambda x: x * ~x.shape[0],
    "told": _telling,
    "copied": lambda x: x * copy.deepcopy([x.shape[0]])[0],
}


@pytest.mark.parametrize("name", STAY_OPEN)
@pytest.mark.parametrize("rows", [4, 7])
def test_the_size_stays_open(name: str, rows: int) -> None:
    """Arithmetic that PyTorch's symbols do not know."""
    model, other = Sized(STAY_OPEN[name]), torch.randn(rows, 3)
    program = whence.capture(model, (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert program.verify(model, (other,)).ok


def _kept(x: Tensor) -> Tensor:
    key = (x.shape[0], 3)
    if key not in SCALES:
        SCALES[key] = 2
    return x * SCALES[key]


FIXED: dict[str, Run] = {
    "key": lambda x: {4: x * 2}.get(x.shape[0], x),
    "shape as key": lambda x: {torch.Size([4, 3]): x * 2}.get(x.shape, x),
    "in a set": lambda x: x * 2 if x.shape[0] in {4, 8} else x,
    "kept outside": _kept,
    "written": lambda x: x * 2 if f"{x.shape[0]}" == "4" else x,
    "written as text": lambda x: x * {"4": 2}.get(str(x.shape[0]), 3),
    "shape that is written": lambda x: x * len(f"{x.shape}"),
    "repr": lambda x: x * len(repr(x.shape[0])),
    "form": lambda x: x * len(f"{x.shape[0]:3d}"),
}


@pytest.mark.parametrize("name", FIXED)
def test_the_size_is_fixed(name: str) -> None:
    """What needs the number is refused with its line where a size must vary; `Dim.AUTO` lets it be fixed."""
    model = Sized(FIXED[name])
    with pytest.raises(whence.SpecialisedShapes, match=r"fixed to 4 because test_plain_answers.py:\d+"):
        whence.capture(model, (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    program = whence.capture(model, (X,), dynamic_shapes=({0: Dim.AUTO},))
    assert program.verify(model, (X,)).ok
    with pytest.raises(whence.CallError, match="must be 4"):
        program.module()(torch.randn(6, 3))
    assert SCALES in ({}, {(4, 3): 2})  # eager's, of the verification
    SCALES.clear()


@lru_cache
def flat(shape: tuple[int, ...]) -> list[int]:
    """A recipe, as einops keeps them by the shape."""
    return [shape[0] * shape[1]]


@wraps(flat)
def wrapped(*shape: int) -> list[int]:
    return flat(*[shape])


class Recipes:
    @cache  # noqa: B019
    def of(self, rows: int) -> list[int]:
        return [rows, -1, 1]

    @staticmethod
    @cache
    def half(rows: int) -> float:
        return rows / 2


RECIPES = Recipes()
tripled: Callable[[int], list[int]] = partial(RECIPES.of)

CALLS: dict[str, Run] = {
    "shape": lambda x: x.reshape(flat(x.shape)),
    "in a function around it": lambda x: x.reshape(wrapped(*x.shape)),
    "method": lambda x: x.reshape(RECIPES.of(x.shape[0])),
    "static method": lambda x: x * RECIPES.half(x.shape[0]),
    "with some arguments": lambda x: x.reshape(tripled(x.shape[0])),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backward", [False, True])
def test_what_a_cache_would_answer_is_computed(name: str, backward: bool) -> None:
    """What decides is what the function does, and not that its results are kept."""
    model, x = Sized(CALLS[name]), X.clone().requires_grad_(backward)
    program = whence.capture(model, (x,), backward=backward, dynamic_shapes=({0: Dim("n", min=2)},))
    other = torch.randn(7, 3, requires_grad=backward)
    assert program.verify(model, (other,)).ok


@pytest.mark.parametrize("name", CALLS)
def test_a_cache_keeps_nothing_of_a_capture(name: str) -> None:
    """Nothing of a capture is kept: the model itself computes afterwards as before."""
    for kept in (flat, Recipes.of, Recipes.half):
        kept.cache_clear()
    model, before = Sized(CALLS[name]), (flat((2, 2)), RECIPES.of(2))
    whence.capture(model, (X,), dynamic_shapes=({0: Dim("n", min=2)},))
    assert model(X).numel() == X.numel()
    assert {type(each) for each in (*flat((4, 3)), *RECIPES.of(4), RECIPES.half(4))} == {int, float}
    assert before[0] is flat((2, 2))
    assert before[1] is RECIPES.of(2)


class Picked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        return rows.reshape(flat(tuple(rows.shape)))


def test_values_that_decide_leave_no_symbols() -> None:
    """The same where the size comes from data."""
    model = Picked()
    whence.capture(model, (X,), decide="example")
    assert model(X).numel() % 3 == 0
