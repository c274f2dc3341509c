"""What a write in place computes is what its functional form computes, to the last bit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

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


class Observed(nn.Module):
    """Learns to be quantised, with statistics of the whole tensor or of each channel."""

    lowest: Tensor
    highest: Tensor
    scale: Tensor
    zero_point: Tensor
    on: Tensor

    def __init__(self, by_channel: bool) -> None:
        super().__init__()
        self.by_channel = by_channel
        for name, value in (("lowest", torch.inf), ("highest", -torch.inf), ("scale", 1.0)):
            self.register_buffer(name, torch.tensor([] if by_channel and name != "scale" else [value]))
        self.register_buffer("zero_point", torch.tensor([0], dtype=torch.int32))
        self.register_buffer("on", torch.tensor([1]))

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.lowest, self.highest, self.scale, self.zero_point
        rounded: Tensor = torch.fused_moving_avg_obs_fake_quant(
            x, self.on, self.on, *statistics, 0.01, -128, 127, 0, self.by_channel, True
        )
        return rounded.sin()


@pytest.mark.parametrize("by_channel", [False, True])
def test_statistics_of_quantised_values(by_channel: bool) -> None:
    """They are written as eager writes them; by channel the first run makes them, and is no program."""
    model, x = Observed(by_channel), torch.linspace(-1, 1, 12).view(3, 4)
    if by_channel:
        with pytest.raises(whence.UnsupportedMutation, match="another shape afterwards") as caught:
            whence.capture(model, (x,))
        assert "run it once before the capture" in str(caught.value)
        model(x)
    eager, y = copy.deepcopy(model), x.cos().requires_grad_()
    program = whence.capture(model, (y,), backward=True)
    assert program.check(model) == []
    tree, z = program.unflatten(copy=True), y.detach().clone().requires_grad_()
    expected, result = eager(y), tree(z)
    assert torch.equal(result, expected)
    expected.sum().backward()
    result.sum().backward()
    assert y.grad is not None and z.grad is not None and torch.equal(y.grad, z.grad)
    assert all(torch.equal(now, eager.get_buffer(name)) for name, now in tree.named_buffers())


class Columns(nn.Module):
    """Writes the columns of as many rows as a mask selects."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        rows = x[(x > -1).all(1)]
        wide = x.new_zeros(rows.shape[0], 3)
        wide[..., 0] = rows.sum(1)
        if self.draws:
            wide[..., 1].bernoulli_(0.5)
        return wide.sum(0)


@pytest.mark.parametrize("draws", [False, True], ids=["copied", "drawn"])
@pytest.mark.parametrize("backward", [False, torch.sum], ids=["forward", "joint"])
def test_columns_of_rows_that_a_mask_selects(draws: bool, backward: Any) -> None:
    """Whether a column is contiguous depends on how many rows there are, and is not asked."""
    model, x = Columns(draws=draws), torch.linspace(-2, 2, 24).view(6, 4).requires_grad_()
    shapes = ({0: Dim.AUTO},)
    program = whence.capture(model, (x,), dynamic_shapes=shapes, backward=backward)
    for held in (x, torch.linspace(-3, 3, 36).view(9, 4).requires_grad_()):
        result = program.verify(model, (held,))
        assert result.ok, str(result)
