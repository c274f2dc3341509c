import pytest
import torch

import whence
from tests.tracing.failing import DATA_DEPENDENT, Failure


@pytest.fixture(params=DATA_DEPENDENT, ids=lambda failure: failure.name)
def failure(request: pytest.FixtureRequest) -> Failure:
    found: Failure = request.param
    return found


def test_value_needed(failure: Failure) -> None:
    """A Python decision that needs a tensor's value is refused, with the line, the reason and the remedy."""
    with pytest.raises(whence.DataDependent) as caught:
        failure.capture(failure.model())
    error = caught.value
    assert error.where.line is not None and "failing.py" in error.where.line
    assert "shapes without numbers" in error.why
    assert "torch.where" in error.remedy


def test_value_needed_in_a_submodule_names_it() -> None:
    """The error names the module whose forward asked, by its path."""
    inner = next(f for f in DATA_DEPENDENT if f.name == "if").model()
    with pytest.raises(whence.DataDependent) as caught:
        whence.capture(torch.nn.Sequential(torch.nn.ReLU(), inner), (torch.ones(2, 4),))
    assert caught.value.where.module == "1"


def test_value_read_in_the_user_s_words() -> None:
    """The error speaks of what the user wrote, not of an operator inside torch."""
    failure = next(f for f in DATA_DEPENDENT if f.name == "if")
    with pytest.raises(whence.DataDependent) as caught:
        failure.capture(failure.model())
    assert "_local_scalar_dense" not in str(caught.value)


def test_known_number_is_no_value() -> None:
    """A tensor made from a literal has a known value, which may be read."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * int(torch.tensor(3))

    program = whence.capture(scaled, (torch.ones(2),))
    assert program.verify(scaled, (torch.ones(2),)).ok
