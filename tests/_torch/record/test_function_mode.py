"""Torch functions that a recording answers, or refuses, before the dispatcher sees them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests._torch.record.test_recorder import recorded
from whence.errors import DataDependent, UnsupportedOperator

KEPT = torch.tensor([[True, False, False, False], [True, True, False, False]])
X = torch.randn(2, 4, 4)


@pytest.mark.canary("torch._nested_tensor_from_mask", "torch._nested_tensor_from_mask_left_aligned")
def test_a_mask_counts_as_aligned_until_it_makes_a_nested_tensor() -> None:
    """Nobody knows its values, and what an encoder then asks may not need them."""

    def encoding(x: Tensor) -> None:
        assert torch._nested_tensor_from_mask_left_aligned(x, KEPT)
        torch._nested_tensor_from_mask(x, KEPT)

    with pytest.raises(DataDependent, match="a nested tensor"):
        recorded(encoding, X)


ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True).eval().requires_grad_(False)
LAYER: Any = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval().requires_grad_(False)


def attended(x: Tensor) -> Any:
    attention = ATTENTION
    return torch._native_multi_head_attention(
        *(x, x, x, 4, 2, attention.in_proj_weight, attention.in_proj_bias),
        *(attention.out_proj.weight, attention.out_proj.bias, None, False),
    )


def layer(x: Tensor) -> Any:
    made = LAYER
    ends = [made.norm1.weight, made.norm1.bias, made.norm2.weight, made.norm2.bias]
    ends += [made.linear1.weight, made.linear1.bias, made.linear2.weight, made.linear2.bias]
    held = made.self_attn
    starts = (held.in_proj_weight, held.in_proj_bias, held.out_proj.weight, held.out_proj.bias)
    return torch._transformer_encoder_layer_fwd(x, 4, 2, *starts, False, False, 1e-5, *ends)


@pytest.mark.canary("torch._transformer_encoder_layer_fwd", "torch._native_multi_head_attention")
@pytest.mark.parametrize("work", [attended, layer])
def test_casts_inside_of_a_kernel_are_refused(work: Callable[[Tensor], Any]) -> None:
    """Under autocast, and only there."""
    targets, _ = recorded(work, X)
    assert targets[0].startswith(("aten._native_multi_head", "aten._transformer_encoder_layer_fwd"))
    with torch.autocast("cpu"), pytest.raises(UnsupportedOperator, match="casts inside"):
        recorded(work, X)


def test_what_was_computed_in_inference_mode_says_so() -> None:
    """A view of what came from outside does not."""

    def asking(x: Tensor) -> None:
        with torch.inference_mode():
            made, view = x * 2, x[0]
        assert (made.is_inference(), view.is_inference(), made[0].is_inference()) == (True, False, True)

    recorded(asking, X)
