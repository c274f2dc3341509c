"""Operators that PyTorch takes on CUDA where it takes others on the CPU, decided without a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from whence._torch.elsewhere.attention import KERNELS, AttentionCall, kernel_of
from whence._torch.elsewhere.target import Elsewhere
from whence.errors import Place, UnsupportedOperator

aten = torch.ops.aten
UNSAID: Any = object()
"""What a rule gives where it has nothing to say: the function does what it does everywhere."""
_LEAST_EPSILON = 1e-5
_LARGEST_BATCH = {True: 880801, False: 65535}
_LARGEST = 2**31 - 1
_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


@dataclass(frozen=True)
class There:
    """What a rule may ask: the device, the place in the model, and whether autograd's half is recorded."""

    elsewhere: Elsewhere
    here: Callable[[], Place]
    is_joint: bool

    def refused(self, what: str, why: str, remedy: str) -> UnsupportedOperator:
        """The error for what is not known without the device."""
        return UnsupportedOperator(
            f"{what} cannot be recorded for {self.elsewhere.device.type}",
            where=self.here(),
            why=why,
            remedy=remedy,
        )


def attention(there: There, *args: Any, **kwargs: Any) -> Any:
    """The kernel that the rules of PyTorch give for this capability."""
    call = AttentionCall(*args, **kwargs)
    if not there.elsewhere.is_here(call.query.device):
        return UNSAID
    kernel = kernel_of(call, there.elsewhere)
    if kernel == "math" and call.dropout_p:
        raise there.refused(
            "attention with dropout by plain products",
            "no fused kernel takes these tensors, and where the mask of its dropout comes from is not known "
            "without the device",
            "use float16 or bfloat16, heads of a width that 8 divides, or dropout outside the attention",
        )
    return KERNELS[kernel](call)


def dropout(there: There, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """A kernel that gives the mask, too."""
    fused = training and not inplace and 0 < p < 1 and input.numel() != 0
    if not fused or not there.elsewhere.is_here(input.device):
        return UNSAID
    return aten.native_dropout.default(input, p, True)[0]


def plain_dropout(there: There, input: Tensor, p: float, train: bool) -> Any:
    """`torch.dropout`, whose arguments have other names."""
    return dropout(there, input, p, train)


def rms_norm(
    there: There, input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    """One kernel, unless the channels come last."""
    last = suggest_memory_format(input) in _CHANNELS_LAST
    if last or input.is_complex() or not there.elsewhere.is_here(input.device):
        return UNSAID
    if weight is not None and weight.dtype != input.dtype:
        return UNSAID
    return aten._fused_rms_norm.default(input, list(normalized_shape), weight, eps)[0]


@dataclass(frozen=True)
class _BatchNorm:
    """The arguments of a batch norm, in the order of the function."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = _LEAST_EPSILON

    @property
    def is_for_cudnn(self) -> bool:
        """What `_batch_norm_impl_index` of `aten/src/ATen/native/Normalization.cpp` asks before it takes
        cuDNN."""
        statistics = {self.running_mean is None, self.running_var is None}
        return (
            torch.backends.cudnn.enabled
            and self.weight is not None
            and self.bias is not None
            and (statistics == {False} or (statistics == {True} and self.training))
            and self.input.dim() > 2
            and self.input.shape[0] <= _LARGEST_BATCH[self.training]
            and self.eps >= _LEAST_EPSILON
            and bool(self.input.numel() < _LARGEST)
        )


def batch_norm(there: There, *args: Any, **kwargs: Any) -> Any:
    """By cuDNN, where it takes the tensors."""
    call = _BatchNorm(*args, **kwargs)
    if not there.elsewhere.is_here(call.input.device) or not call.is_for_cudnn:
        return UNSAID
    there.elsewhere.presume("cuDNN is there, and normalises batches")
    input = call.input.contiguous(memory_format=suggest_memory_format(call.input))
    numbers = (call.training, call.momentum, call.eps)
    held = (call.weight, call.bias, call.running_mean, call.running_var)
    return aten.cudnn_batch_norm.default(input, *held, *numbers)[0]


Rule = Callable[..., Any]
RULES: Mapping[Any, Rule] = {
    F.scaled_dot_product_attention: attention,
    F.dropout: dropout,
    torch.dropout: plain_dropout,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.batch_norm: batch_norm,
}
"""By torch functions, as models call them."""
