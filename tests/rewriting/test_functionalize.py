"""What a write in place computes is what its functional form computes, to the last bit."""

import pytest
import torch
from torch import Tensor, nn

import whence


class Scaled(nn.Module):
    """Multiplies by a number in place, alone or in a list."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> list[Tensor]:
        held = [x.sin(), x.cos()]
        if self.way == "list":
            torch._foreach_mul_(held, 0.3)
        elif self.way == "numbers":
            torch._foreach_mul_(held, [0.3, 0.7])
        else:
            torch.ops.aten.mul_.Scalar(held[0], 0.3)
        return held


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("way", ["list", "numbers", "alone"])
def test_half_precision_is_multiplied_by_a_rounded_number(way: str, dtype: torch.dtype) -> None:
    """In place a CPU rounds the number first, and the functional operators do not."""
    x = torch.linspace(-2, 2, 64).to(dtype)
    program = whence.capture(Scaled(way), (x,))
    assert all(map(torch.equal, program.module()(x), Scaled(way)(x)))


class SharedBySparse(nn.Module):
    """Writes the values of a sparse tensor, or that tensor itself, before or after the other is read."""

    def __init__(self, written: str, is_read: bool) -> None:
        super().__init__()
        self.written, self.is_read = written, is_read

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        values = x.clone()
        sparse = torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=False)
        dense, total = sparse.to_dense(), values.sum()
        (values if self.written == "values" else sparse).mul_(2)
        if not self.is_read:
            return dense + total
        return sparse.to_dense() if self.written == "values" else values.sum()


@pytest.mark.parametrize("written", ["values", "sparse"])
def test_a_write_that_a_sparse_tensor_shares(written: str) -> None:
    """Both are one memory: a write is refused where the other is read afterwards."""
    example = torch.randn(2, 2), torch.tensor([[0, 2]])
    model = SharedBySparse(written, is_read=False)
    assert torch.equal(whence.capture(model, example).module()(*example), model(*example))
    with pytest.raises(whence.UnsupportedMutation, match="shares the memory"):
        whence.capture(SharedBySparse(written, is_read=True), example)
