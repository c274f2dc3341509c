"""Numbers are short."""

import pytest

from whence.reports.numbers import scaled


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 "), (999, "999 "), (1000, "1 k"), (1234567, "1.23 M"), (9.996e8, "1 G")]
)
def test_numbers_have_three_digits(number: float, text: str) -> None:
    """And a power of a thousand."""
    assert scaled(number) == text
