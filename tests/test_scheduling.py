"""Which tests run in one process."""

from pathlib import Path

import pytest

from tests.models import MODEL_CASES
from tests.scheduling import models, scope_of


@pytest.mark.parametrize(
    ("test", "scope"),
    [
        ("tests/test_a.py::test_it[gpt2-loss]", "gpt2"),
        ("tests/test_b.py::test_more[True-gpt2]", "gpt2"),
        ("tests/test_b.py::test_more[gpt2 of another size]", "tests/test_b.py"),
        ("tests/test_b.py::test_gpt2", "tests/test_b.py"),
    ],
)
def test_what_is_of_one_model_is_together(test: str, scope: str) -> None:
    """Whatever file it is in; else what is in one file is."""
    assert scope_of(test, {"gpt2", "t5"}) == scope


def test_names_are_those_of_the_table() -> None:
    """All of them."""
    assert models() == {case.name for case in MODEL_CASES}


FILE = """
import pytest


@pytest.mark.parametrize("row", ["gpt2", "own"])
def test_row(row, worker_id):
    print("on", row, worker_id)
"""


@pytest.mark.sweep
def test_processes_share_the_work_by_model(pytester: pytest.Pytester) -> None:
    """Rows of a model run in one of several processes."""
    root = str(Path(__file__).parents[1])
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {root!r})\nfrom tests.scheduling import pytest_xdist_make_scheduler"
    )
    pytester.makepyfile(**{f"test_{name}": FILE for name in "abcd"})
    result = pytester.runpytest("-n", "2", "--dist", "loadgroup", "-rP")
    result.assert_outcomes(passed=8)
    said = {line for line in result.outlines if line.startswith("on gpt2")}
    assert len(said) == 1
