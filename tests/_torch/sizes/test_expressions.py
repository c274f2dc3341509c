"""How conditions on sizes are read and written."""

import itertools
import math

import pytest
import sympy
import torch

from whence._torch.sizes.expressions import (
    are_same_at,
    asks_for_one,
    can_view,
    divisor,
    in_words,
    is_implied,
    linear,
    number_at,
    spell,
)

N, M = sympy.symbols("n m", integer=True, positive=True)
NAMES = {N: "rows", M: "columns"}


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (sympy.Eq(N, 4), "4"),
        (sympy.Ne(N, 4), "other than 4"),
        (N >= 4, "at least 4"),
        (N > 4, "at least 5"),
        (N <= 4, "at most 4"),
        (N < 4, "at most 3"),
        (sympy.Ne(64 * N, 64, evaluate=False), "other than 1"),
        (N - 7 < 0, "at most 6"),
        (sympy.Eq(sympy.Mod(N, 8), 0), "a multiple of 8"),
        (sympy.Eq(N, M), "such that rows == columns"),
    ],
)
def test_a_condition_in_words(condition: sympy.Basic, words: str) -> None:
    """What one size must be is said of it alone; what several must be, as the source that asks it."""
    assert in_words(condition, NAMES) == words


def test_only_a_sum_and_a_product_with_numbers_is_linear() -> None:
    """A size that is computed of one other is that, taken so often, and so much; a quotient is not."""
    assert linear(3 * N - 1) == (N, 3, -1)
    assert linear(N // 2) is None
    assert linear(N * M) is None


@pytest.mark.parametrize(
    ("other", "condition", "implied"),
    [
        (N > 8, N > 4, True),
        (N > 4, N > 8, False),
        (N > 4, sympy.Ne(N, 1), True),
        (N > 4, sympy.Ne(N, 6), False),
        (M > 8, N > 4, False),
        (sympy.Ne(N, 8), N > 4, False),
    ],
)
def test_a_stronger_bound_makes_one_needless(
    other: sympy.Basic, condition: sympy.Basic, implied: bool
) -> None:
    """A bound on the same size that leaves less is all there is to say."""
    assert is_implied(condition, [other]) is implied


def test_sizes_at_given_numbers() -> None:
    """Sizes are the same where names have these values; a division by nothing is not the same as anything."""
    n = sympy.Symbol("n", integer=True)
    assert are_same_at(n * 2, 8, {"n": 4})
    assert not are_same_at(n * 2, 8, {"n": 3})
    assert not are_same_at(8 / n, n, {"n": 0})
    assert number_at(n + 1, {"n": 4}) == 5
    assert number_at(n + 1, {}) is None


def test_source() -> None:
    """Expressions are Python's, over the names of sizes."""
    assert spell(2 * N + 1, NAMES) == "1 + 2*rows"
    assert spell(sympy.Float(0.5) * N, NAMES) == "0.5*rows"
    assert divisor(sympy.Eq(sympy.Mod(N, 8), 0)) == 8
    assert divisor(sympy.Eq(N, 8)) is None


def test_who_asks_for_one() -> None:
    """A size, or a stride that is a multiple of it, beside that of 1."""
    assert asks_for_one(sympy.Ne(64 * N, 64, evaluate=False))
    assert not asks_for_one(sympy.Ne(N * M, 64, evaluate=False))
    assert not asks_for_one(N > 1)


def _has_view(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    try:
        torch.empty_strided(shape, strides, device="meta").view(wanted)
    except RuntimeError:
        return False
    return True


def test_whether_there_is_a_view_is_as_torch_decides() -> None:
    """All layouts of small tensors, with dimensions of 0 and 1, and such that are expanded or cut."""
    for shape in itertools.product((0, 1, 2, 3, 4), (1, 2, 4), (1, 3, 4)):
        wanted = {(math.prod(shape),), shape, shape[::-1], (shape[0] * shape[1], shape[2])}
        wanted |= {(shape[0], 2, shape[1] // 2, shape[2])} if shape[1] % 2 == 0 else set()
        dense = torch.empty(shape, device="meta")
        turned = [dense.permute(order).stride() for order in itertools.permutations(range(3))]
        for strides in (*turned, (0, 0, 1), (0, shape[2], 1), (shape[2], 0, 1), (24, 6, 1), (24, 8, 2)):
            laid_out = torch.empty_strided(shape, strides, device="meta")
            assert can_view(shape, strides, None) is laid_out.is_contiguous(), (shape, strides)
            for each in wanted:
                assert can_view(shape, strides, each) is _has_view(shape, strides, each), (
                    shape,
                    strides,
                    each,
                )


@pytest.mark.parametrize(
    ("shape", "strides", "wanted", "answer"),
    [
        ((N, M, 8), (8 * M, 8, 1), (N * M, 8), True),
        ((M, N, 8), (8, 8 * M, 1), (N * M, 8), False),
        ((M, N, 8), (8, 8 * M, 1), (M, N, 2, 4), True),
        ((M, N), (1, M), (N, M), None),  # a square
        ((N, M - 1), (M, 1), (N * (M - 1),), None),  # where there is one column
        ((N, 4), (M, 1), (4 * N,), None),
        ((N, 1, M), (M, 3, 1), (N, M), True),
        ((N, 0), (M, 1), (0,), True),
        ((N, M), (M, 1), None, True),
        ((M, N), (1, M), None, False),
        ((N, 4), (M, 1), None, None),
        ((N,), (sympy.floor(M / 2),), None, None),
    ],
)
def test_whether_there_is_a_view_at_all_sizes(
    shape: tuple[object, ...],
    strides: tuple[object, ...],
    wanted: tuple[object, ...] | None,
    answer: bool | None,
) -> None:
    """Of two and more; None where they decide."""
    assert can_view(shape, strides, wanted) is answer
