"""What rows of the signature are called."""

import pytest
import torch
from torch import Tensor, nn

import whence


class Holding(nn.Module):
    """Holds a tensor by the name that a literal would have, and may read it."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.lifted_tensor_0, self.reads = torch.tensor([7.0]), reads

    def forward(self, x: Tensor) -> Tensor:
        result = x * torch.tensor([3.0])
        return result * self.lifted_tensor_0 if self.reads else result


@pytest.mark.parametrize("view", ["inputs", "attributes"])
@pytest.mark.parametrize("reads", [True, False])
def test_a_literal_has_a_path_of_its_own(reads: bool, view: str) -> None:
    """It is not taken for a tensor of the model that is called as it would be."""
    model, x = Holding(reads), torch.ones(2)
    program = whence.capture(model, (x,), state=view)
    assert program.verify(model, (x,)).ok
    for module in (program.module(), program.unflatten(), program.unflatten(onto=model)):
        assert torch.equal(module(x), model(x))
