import pytest
import torch
from torch import Tensor

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
