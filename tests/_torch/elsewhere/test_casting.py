"""Autocast on a device that is not here casts what it casts there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whence
from tests.models import mean_sine

HALF, FULL = torch.bfloat16, torch.float32
X = torch.randn(2, 4, 8, 8)
Computed = Callable[[Tensor, Tensor], Tensor]


class Casting(nn.Module):
    """Computes something of its input and a weight under autocast."""

    def __init__(self, computed: Computed, dtype: torch.dtype = HALF) -> None:
        super().__init__()
        self.computed, self.dtype = computed, dtype
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=self.dtype):
            return self.computed(x, self.weight)


def captured(computed: Computed, dtype: torch.dtype = HALF, *, backward: Any = False) -> whence.Program:
    return whence.capture(Casting(computed, dtype), (X,), backward=backward, device="cuda:sm90")


def half(x: Tensor, weight: Tensor) -> Tensor:
    """A product of half precision, which the next function is given at once."""
    return x @ weight


CAST: dict[str, tuple[Computed, torch.dtype]] = {
    "a product": (half, HALF),
    "a layer": (F.linear, HALF),
    "a product of another's result": (lambda x, w: half(x, w) @ w, HALF),
    "products inside of a composite": (lambda x, w: torch.einsum("abij,jk->abik", x * 2, w + 1), HALF),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x, x * w, x), HALF),
    "a softmax": (lambda x, w: half(x, w).softmax(-1), FULL),
    "a norm": (lambda x, w: F.layer_norm(half(x, w), (8,)), FULL),
    "a norm that has a rule": (lambda x, w: F.rms_norm(half(x, w), (8,)), FULL),
    "a power": (lambda x, w: half(x, w).pow(2), FULL),
    "a sum": (lambda x, w: half(x, w).sum(-1), FULL),
    "a loss": (lambda x, w: F.mse_loss(half(x, w), x), FULL),
    "both in a list": (lambda x, w: torch.cat([half(x, w), x]), FULL),
    "what is not cast": (lambda x, w: F.gelu(half(x, w)), HALF),
    "what adds": (lambda x, w: half(x, w) + x, FULL),
    "double precision": (lambda x, w: x.double() @ w.double(), torch.float64),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize("name", CAST)
def test_casts(name: str, backward: bool) -> None:
    """By the rules of that device, in the forward and where autograd follows."""
    computed, dtype = CAST[name]
    program = captured(computed, backward=backward)
    result = program.graph_module.graph.output_node().args[0]
    assert result[0].meta["val"].dtype is dtype  # type: ignore[index,union-attr]


def test_gradients_come_back_as_the_parameters_are() -> None:
    """Through each cast of the forward."""
    program = captured(half, torch.float16, backward=mean_sine)
    assert program.node(str(program.output("weight").node)).meta["val"].dtype is FULL


@pytest.mark.canary("torch._C.DispatchKey.AutocastCUDA")
def test_a_weight_is_cast_once() -> None:
    """Autocast keeps it, as long as the region lasts."""
    program = captured(lambda x, w: (x @ w + x @ w) @ w, backward=True)
    casts = [node.args[0] for node in program.graph.nodes if "_to_copy" in str(node.target)]
    weight = next(node for node in program.graph.nodes if node.name == "p_weight")
    assert casts.count(weight) == 1


def _inside(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return half(x, weight)


def test_a_region_in_which_nothing_is_cast() -> None:
    """Nor is anything outside of one."""
    program = captured(_inside)
    assert not any("_to_copy" in str(node.target) for node in program.graph.nodes)


def test_checkpoints_cast_again() -> None:
    """What is computed again is what was computed."""

    def checkpointed(x: Tensor, weight: Tensor) -> Tensor:
        again: Tensor = checkpoint(lambda given: half(given, weight).softmax(-1), x, use_reentrant=False)
        return again

    program = captured(checkpointed, backward=True)
    products = [node.meta["val"].dtype for node in program.graph.nodes if ".mm" in str(node.target)]
    assert products == [HALF] * 3


def test_attention_takes_the_kernel_of_the_dtype_that_it_is_cast_to() -> None:
    """And not that of its arguments."""
    program = captured(CAST["attention"][0])
    assert any("cudnn_attention" in str(node.target) for node in program.graph.nodes)
