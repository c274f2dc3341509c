"""How conditions on sizes are read and written."""

import pytest
import sympy

from whence._torch.sizes.expressions import (
    are_same_at,
    asks_for_one,
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
