"""Convolutions of a device that is not here lay out what they give as they do there."""

import pytest
import torch
from torch import Tensor, nn

import whence

LAST = torch.channels_last


@pytest.mark.parametrize(
    ("dtype", "of_input", "of_weight", "is_last"),
    [
        (torch.float32, torch.contiguous_format, torch.contiguous_format, False),
        (torch.float32, LAST, torch.contiguous_format, True),
        (torch.bfloat16, torch.contiguous_format, LAST, True),
        (torch.float64, LAST, LAST, False),
    ],
    ids=["neither", "the input", "the weight", "double precision"],
)
def test_channels_last(
    dtype: torch.dtype, of_input: torch.memory_format, of_weight: torch.memory_format, is_last: bool
) -> None:
    """Where the input or the weight has them last, and so is the gradient of the weight."""
    model = nn.Conv2d(4, 8, 3, padding=1, dtype=dtype)
    model.weight.data = model.weight.data.to(memory_format=of_weight)
    x = torch.randn(2, 4, 6, 6, dtype=dtype).to(memory_format=of_input)
    program = whence.capture(model, (x,), device="cuda:sm90", backward=True)
    values = {str(node.target): node.meta.get("val") for node in program.graph.nodes}
    result, (_, gradient, _) = (values[f"aten.convolution{name}.default"] for name in ("", "_backward"))
    assert [each.is_contiguous(memory_format=LAST) for each in (result, gradient)] == [is_last] * 2


def test_what_uses_the_result_is_laid_out_so() -> None:
    """Channels that come last already are turned into a row without a copy."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(4, 8, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.patches(x).permute(0, 2, 3, 1).reshape(-1, 8)

    x = torch.randn(2, 4, 6, 6).to(memory_format=LAST)
    program = whence.capture(Tokens(), (x,), device="cuda:sm90", backward=True)
    forward = [str(node.target) for node in program.graph.nodes]
    assert "aten.clone.default" not in forward[: forward.index("aten.view.default")]
