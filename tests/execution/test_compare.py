import pytest
import torch
from torch import Tensor

from whence.execution.compare import same_bits

NAN = float("nan")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        pytest.param(torch.tensor([1.0]), torch.tensor([1.0]), True, id="equal"),
        pytest.param(torch.tensor([1.0]), torch.tensor([1.0 + 1e-7]), False, id="last bit"),
        pytest.param(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True, id="nan"),
        pytest.param(torch.tensor([NAN]), torch.tensor([1.0]), False, id="nan and number"),
        pytest.param(torch.tensor([NAN]), torch.tensor([-NAN]), True, id="nan and another"),
        pytest.param(torch.tensor([0.0]), torch.tensor([-0.0]), False, id="zeros of two signs"),
        pytest.param(torch.tensor(complex(0, -0.0)), torch.tensor(0j), False, id="complex zeros"),
        pytest.param(torch.ones(2, 3).t(), torch.ones(3, 2), True, id="two layouts"),
        pytest.param(torch.tensor([1]), torch.tensor([2]), False, id="integers"),
        pytest.param(torch.tensor([True]), torch.tensor([True]), True, id="booleans"),
        pytest.param(
            torch.tensor([complex(NAN, 1)]), torch.tensor([complex(NAN, 1)]), True, id="complex nan"
        ),
        pytest.param(torch.empty(0), torch.empty(0), True, id="nothing"),
        pytest.param(torch.tensor([float("inf")]), torch.tensor([float("inf")]), True, id="infinity"),
    ],
)
def test_same_bits(left: Tensor, right: Tensor, expected: bool) -> None:
    """Tensors are the same when every number is, NaN being the same as NaN."""
    assert same_bits(left, right) is expected
