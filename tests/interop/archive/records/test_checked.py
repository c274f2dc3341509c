"""What plain data may be."""

from __future__ import annotations

import pytest

from whence.interop.archive.records.checked import (
    Unreadable,
    expanded,
    identifier,
    names,
    places,
    sized,
    text,
)

SIZES = """
rows | 2*rows + 1 | max(rows, 3)//2 | rows % 8 == 0 | math.floor(rows/2) | rows**2 | -rows | 7 | not rows == 3
rows if rows > 2 else 1 | (rows > 2) and (rows <= 64) | torch.sym_max(rows, 2)
"""
OTHERS = """
__import__('os') | rows.__class__ | open('x') | 'a' * 9 | [1][0] | lambda: 0 | f'{rows}' | (x := 3) | 9**9**9
2**rows | 1 << 99 | rows @ rows | max(*rows) | max(rows, key=1) | math.__loader__ | math.factorial(9) | __x
torch.load('x') | torch.ops | print(1) | await x | {1} | rows;rows | 1 if True else __builtins__ | ... | 1j
None | torch.sym_max.__globals__ | "" | rows rows
"""


def spelled(table: str) -> list[str]:
    return [each.strip() for row in table.strip().splitlines() for each in row.split(" | ")]


@pytest.mark.parametrize("size", spelled(SIZES))
def test_arithmetic_is_a_size(size: str) -> None:
    """Numbers and expressions over names of sizes."""
    assert sized(size) == size and sized(7) == 7


@pytest.mark.parametrize("size", [*spelled(OTHERS), "", "x" * 20_000])
def test_anything_else_is_none(size: str) -> None:
    """Calls of other functions, attributes, texts, powers that nobody limits."""
    with pytest.raises((Unreadable, SyntaxError)):
        sized(size)


@pytest.mark.parametrize("name", ["a b", "1a", "class", "", "__class__", "a.b", "a\n", 3, None])
def test_names_are_identifiers(name: object) -> None:
    """No keywords, nothing with two underscores in front, no code."""
    with pytest.raises(Unreadable):
        identifier(name)


def test_columns_are_looked_at_at_once() -> None:
    """Numbers that lead nowhere, names twice or none, distinct things that are not there."""
    assert places([0, None, 1], "ab") == [0, None, 1] and names(["a", "b"]) == ["a", "b"]
    for wrong in ([2], [-1], [True], ["0"], [0.0]):
        with pytest.raises(Unreadable):
            places(wrong, "ab")
    for spelled in (["a", "a"], ["a", 1], ["é"], ["a b"], ["def"]):
        with pytest.raises(Unreadable):
            names(spelled)
    assert expanded({"distinct": ["x"], "at": [0, 0]}, text) == ["x", "x"]
    with pytest.raises(Unreadable):
        expanded({"distinct": ["x"], "at": [-1]}, text)
