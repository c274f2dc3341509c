"""What `make test` runs of long tables."""

import pytest

from tests.sampling import is_drawn, sample

PRODUCT = {f"{model}-{mode}]": None for model in "abcdef" for mode in ("forward", "loss", "tangents")}
NEEDED = """
    import pytest

    from tests.sampling import mark_sweeps


    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(items):
        mark_sweeps(items)
"""
TABLES = """
    import pytest


    @pytest.mark.sample(2)
    @pytest.mark.parametrize("row", [*range(5), pytest.param(5, marks=pytest.mark.slow)])
    def test_long(row): ...


    @pytest.mark.parametrize("row", [*range(2), pytest.param(2, marks=pytest.mark.sweep)])
    def test_short(row): ...
"""


def test_every_model_and_every_mode_is_in_a_sample() -> None:
    """A product gives as many rows as its longer side has."""
    words = {word for row in sample(PRODUCT, 6) for word in row.rstrip("]").split("-")}
    assert words == {*"abcdef", "forward", "loss", "tangents"}


def test_the_order_of_rows_does_not_matter() -> None:
    """Workers choose the same, and so does a run of a part of the tests in another order."""
    assert sample(PRODUCT, 6) == sample(dict(reversed(PRODUCT.items())), 6)


def test_tests_of_the_same_rows_take_the_same() -> None:
    """A smaller sample is in a larger one: what one of them has captured, the other reads."""
    assert sample(PRODUCT, 3) < sample(PRODUCT, 6) < PRODUCT.keys() == sample(PRODUCT, 100)


LARGE_ONES = """
    import pytest


    @pytest.mark.parametrize("model", ["t5", "lstm"])
    def test_of_both(model): ...


    @pytest.mark.sample(2, large=True)
    @pytest.mark.parametrize("model", ["t5", "lstm"])
    def test_of_the_large_one_too(model): ...


    @pytest.mark.parametrize("model", ["t5"])
    def test_of_the_large_one_alone(model): ...
"""


def test_large_models_are_where_there_are_no_others_or_they_are_asked_for(pytester: pytest.Pytester) -> None:
    """Else they are sweeps."""
    pytester.makeconftest(NEEDED)
    pytester.makepyfile(LARGE_ONES)
    result = pytester.runpytest("-W", "ignore::pytest.PytestUnknownMarkWarning", "-m", "sweep", "-v")
    result.assert_outcomes(passed=1, deselected=4)
    result.stdout.fnmatch_lines(["*test_of_both[[]t5[]] PASSED*"])


@pytest.mark.parametrize(
    ("chosen", "count"),
    [("not slow and not sweep", 4), ("sweep and not slow", 4), ("not slow", 8), ("slow or sweep", 5)],
)
def test_each_row_runs_in_one_of_them(pytester: pytest.Pytester, chosen: str, count: int) -> None:
    """Samples and sweeps are all that is not slow."""
    pytester.makeconftest(NEEDED)
    pytester.makepyfile(TABLES)
    result = pytester.runpytest("-W", "ignore::pytest.PytestUnknownMarkWarning", "-m", chosen)
    result.assert_outcomes(passed=count, deselected=9 - count)


def test_one_in_so_many_sweeps() -> None:
    """Every sweep runs in some draw, the same ones in each run of one, and about as many as are asked for."""
    chosen = [{row for row in PRODUCT if is_drawn(row, 2, str(draw))} for draw in range(12)]
    assert set().union(*chosen) == {*PRODUCT}
    assert all(4 <= len(rows) <= 14 for rows in chosen) and len({*map(frozenset, chosen)}) > 6
    assert all(is_drawn(row, 1, "") for row in PRODUCT)
