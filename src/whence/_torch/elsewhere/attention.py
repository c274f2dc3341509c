"""Which kernel of attention PyTorch takes on a CUDA device, and the operators that it runs there.

The rules are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (which kernel) and of
`scaled_dot_product_attention` in `aten/src/ATen/native/transformers/attention.cpp` (what is run), of PyTorch
2.13 to 2.15, for dense tensors. Each kernel has a list of what it asks of the tensors, and the first in the
order of priority that has no objection is taken.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whence._torch.autograd.switches import SWITCHES
from whence._torch.elsewhere.target import PRESUMED, Capability, Elsewhere
from whence._torch.versions.grouped_heads import GROUPED_EVERYWHERE

_C: Any = torch._C
_HALF = frozenset({torch.float16, torch.bfloat16})
_WIDEST_FLASH = 256
_WIDEST_CUDNN = 128
_DEFAULT_ORDER = (1, 2, 0, 3)
_CUDNN_FIRST = (3, 1, 2, 0)
_NAMES: Mapping[int, str] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""The numbers by which `torch.nn.attention.SDPBackend` knows them."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def differentiates(self) -> bool:
        """Whether there will be a backward, for which what the kernel summed up is kept."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    @property
    def bias(self) -> Tensor | None:
        """The mask as something that is added."""
        mask = self.attn_mask
        if mask is None or mask.dtype is not torch.bool:
            return mask
        empty = torch.zeros((), dtype=self.query.dtype, device=self.query.device)
        return torch.where(mask, empty, torch.full_like(empty, -math.inf))


def kernel_of(call: AttentionCall, elsewhere: Elsewhere) -> str:
    """The kernel that is taken: `cudnn`, `flash`, `efficient` or `math`."""
    capability = elsewhere.capability or PRESUMED
    if elsewhere.capability is None:
        elsewhere.presume("attention takes the kernels of sm80: name another capability as in 'cuda:sm90'")
    order = _order(capability, elsewhere)
    found = next(
        (name for name in order if _is_kernel_on(name) and not any(_OBJECTS[name](call, capability))), None
    )
    return "math" if found is None else found


def _order(capability: Capability, elsewhere: Elsewhere) -> list[str]:
    """The order that was set; the usual one begins with cuDNN where that is the fastest.

    On a device of sm90 PyTorch has settled so for itself, and for no other device.
    """
    order = [number for number in SWITCHES["order of attention"].read() if number in _NAMES]
    if capability == (9, 0) and tuple(order) == _DEFAULT_ORDER:
        elsewhere.presume("cuDNN is newer than 9.15 there, and comes first for attention on sm90")
        order = list(_CUDNN_FIRST)
    if capability != (9, 0) and tuple(order) == _CUDNN_FIRST:
        order = list(_DEFAULT_ORDER)
    return [_NAMES[number] for number in order]


def _is_kernel_on(name: str) -> bool:
    return name in SWITCHES["attention kernels"].read()


def _general(call: AttentionCall) -> Iterator[bool]:
    """What no fused kernel takes."""
    yield any(tensor.dim() != 4 for tensor in call.tensors)
    yield any(tensor.dim() == 4 and 0 in (tensor.shape[0], tensor.shape[-2]) for tensor in call.tensors)
    yield any(tensor.shape[0] != call.query.shape[0] for tensor in call.tensors)


def _heads_fit(call: AttentionCall, *, grouped: bool = True, alike: bool = True) -> bool:
    """Whether the numbers of heads fit; where they may be `grouped`, those of keys and values `alike`."""
    heads, of_key, of_value = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in call.tensors)
    if call.enable_gqa and grouped:
        fit = all(each and heads % each == 0 for each in (of_key, of_value))
        return fit and (of_key == of_value or not alike)
    one_for_all = GROUPED_EVERYWHERE and heads > 0 and of_key == of_value == 1
    return heads == of_key == of_value or one_for_all


def _flash(call: AttentionCall, _capability: Capability) -> Iterator[bool]:
    yield from _general(call)
    yield not _heads_fit(call)
    yield call.attn_mask is not None
    yield any(tensor.shape[-1] != call.query.shape[-1] for tensor in call.tensors)
    yield call.query.shape[-1] > _WIDEST_FLASH
    yield call.is_causal and call.query.shape[-2] != call.key.shape[-2]
    yield not _are_half(call)
    yield not _are_dense_inside(call, single_counts=False)


def _efficient(call: AttentionCall, _capability: Capability) -> Iterator[bool]:
    aligned = 8 if call.query.dtype in _HALF else 4
    yield from _general(call)
    yield not _heads_fit(call, grouped=GROUPED_EVERYWHERE)
    yield call.query.shape[-1] != call.key.shape[-1]
    yield any(not width or width % aligned for width in (call.query.shape[-1], call.value.shape[-1]))
    yield any(tensor.storage_offset() % aligned for tensor in call.tensors if tensor.numel())
    yield not (_are_half(call) or all(tensor.dtype is torch.float32 for tensor in call.tensors))
    yield not _are_dense_inside(call, single_counts=True)


def _cudnn(call: AttentionCall, _capability: Capability) -> Iterator[bool]:
    sizes = [tensor.shape[-1] for tensor in call.tensors]
    yield from _general(call)
    yield not _heads_fit(call, alike=False)
    yield torch.are_deterministic_algorithms_enabled() and not (
        torch.is_deterministic_algorithms_warn_only_enabled()
    )
    yield not _are_half(call)
    yield not _mask_fits(call)
    yield call.dropout_p * 16 != math.floor(call.dropout_p * 16)
    yield any(size % 8 or size > _WIDEST_CUDNN for size in sizes)
    yield call.key.shape[-2] == 1 or (call.dropout_p != 0 and call.query.shape[-2] == 1)
    yield not _are_dense_inside(call, single_counts=False)


def _mask_fits(call: AttentionCall) -> bool:
    mask = call.attn_mask
    if mask is None:
        return True
    batch, heads, rows, _ = call.query.shape
    whole = (batch, heads, rows, call.key.shape[-2])
    fit = all(size in (1, of) for size, of in zip(mask.shape, whole[-mask.dim() :], strict=True))
    return fit and mask.dim() in (2, 4) and not mask.requires_grad


def _math(_call: AttentionCall, _capability: Capability) -> Iterator[bool]:
    yield False


_OBJECTS: Mapping[str, Callable[[AttentionCall, Capability], Iterator[bool]]] = {
    "math": _math,
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
}


def _are_half(call: AttentionCall) -> bool:
    kinds = {tensor.dtype for tensor in call.tensors}
    return len(kinds) == 1 and kinds <= _HALF


def _are_dense_inside(call: AttentionCall, *, single_counts: bool) -> bool:
    """Whether numbers of one head lie side by side; also where there is one alone, if it counts."""
    mask = call.attn_mask
    return (mask is None or mask.stride(-1) == 1) and all(
        tensor.stride(-1) == 1 or (not single_counts and tensor.shape[-1] == 1) for tensor in call.tensors
    )


def run_flash(call: AttentionCall) -> Tensor:
    """Heads are made as wide as a multiple of 8, and what came of that is cut off again."""
    width = call.query.shape[-1]
    scale = 1.0 / math.sqrt(width) if call.scale is None else call.scale
    padded = [F.pad(t, (0, 8 - width % 8)) if width % 8 else t for t in call.tensors]
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default
    result: Tensor = attend(*padded, call.dropout_p, call.is_causal, False, scale=scale)[0]
    return result[..., :width] if width % 8 else result


def run_efficient(call: AttentionCall) -> Tensor:
    """A mask is as large as all scores, and its rows begin at multiples of 8."""
    bias = None if call.attn_mask is None else _for_efficient(call)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention.default
    arguments = (*call.tensors, bias, call.differentiates, call.dropout_p, call.is_causal)
    result: Tensor = attend(*arguments, scale=call.scale)[0]
    return result


def _for_efficient(call: AttentionCall) -> Tensor:
    bias: Any = call.bias
    aligned = bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1])
    if not aligned:
        last = bias.shape[-1]
        bias = torch.ops.aten.slice.Tensor(F.pad(bias, (0, 8 - last % 8)), -1, 0, last)
    batch, heads, rows, _ = call.query.shape
    return bias.expand(batch, heads, rows, call.key.shape[-2])  # type: ignore[no-any-return]


def run_cudnn(call: AttentionCall) -> Tensor:
    """The mask is taken as it is."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    arguments = (*call.tensors, call.bias, call.differentiates, call.dropout_p, call.is_causal, False)
    result: Tensor = attend(*arguments, scale=call.scale)[0]
    return result


def run_math(call: AttentionCall) -> Tensor:
    """Products and a softmax."""
    attend = torch.ops.aten._scaled_dot_product_attention_math.default
    arguments = (*call.tensors, call.bias, 0.0, call.is_causal, None)
    result: Tensor = attend(*arguments, scale=call.scale, enable_gqa=call.enable_gqa)[0]
    return result


KERNELS: Mapping[str, Callable[[AttentionCall], Tensor]] = {
    "math": run_math,
    "flash": run_flash,
    "efficient": run_efficient,
    "cudnn": run_cudnn,
}
