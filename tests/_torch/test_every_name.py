"""No private name enters whence without a canary."""

from pathlib import Path

import pytest

from tests.test_private_torch import SOURCE, private_uses

TESTS = Path(__file__).parent
NAMES = sorted(
    {
        use.split(": ")[1]
        for file in sorted((SOURCE / "_torch").glob("*.py"))
        for use in private_uses(file.read_text())
    }
)


@pytest.mark.parametrize("name", NAMES)
def test_private_name_is_in_a_canary(name: str) -> None:
    """Every private name that `whence._torch` uses is spelled in a test of this folder."""
    last = name.rpartition(".")[2]
    assert any(last in file.read_text() for file in TESTS.glob("test_*.py") if file != Path(__file__))
