import pytest
import torch
from torch import Tensor, nn

import whence


@pytest.mark.canary("torch._assert")
def test_an_assertion_of_torch_is_one_of_the_program() -> None:
    """`torch._assert` of a tensor asks for its truth by that name, and every run looks at it."""

    def positive(x: Tensor) -> Tensor:
        torch._assert((x > 0).all(), "not positive")
        return x.sin()

    run = whence.capture(positive, (torch.ones(2),)).module()
    assert torch.equal(run(torch.full((2,), 2.0)), torch.full((2,), 2.0).sin())
    with pytest.raises(RuntimeError, match="the model requires otherwise"):
        run(torch.zeros(2))


class Converting(nn.Module):
    """Brings a part of itself to a dtype, as routers do that compute in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.to(self.dtype)(x.to(self.dtype))


def test_a_module_that_is_what_it_is_brought_to() -> None:
    """Nothing is written then; with another dtype there would be other parameters."""
    x = torch.randn(2, 4)
    model = Converting(torch.float32)
    assert whence.capture(model, (x,)).verify(model, (x,)).ok
    with pytest.raises(whence.LostState, match=r"linear\.weight"):
        whence.capture(Converting(torch.float64), (x,))


@pytest.mark.parametrize("backward", [False, True])
def test_an_index_made_of_single_numbers(backward: bool) -> None:
    """`x[rows, columns]` with tuples of tensors: they are one tensor, of which nobody needs the numbers."""

    class Marking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            rows, columns = zip(*x.argsort(1)[:, :2], strict=True)
            x = self.linear(x)
            x[rows, columns] = 0.0
            return x * x[:, rows].sum()

    model, x = Marking(), torch.randn(4, 4)
    program = whence.capture(model, (x,), backward=backward)
    assert not program.decisions
    for inputs in (x, torch.randn(4, 4)):
        assert program.verify(model, (inputs,)).ok
