"""How convolutions of cuDNN lay out what they give, where C++ would ask a device that is not here."""

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_LAST = (torch.channels_last, torch.channels_last_3d)
_PLACES = {_aten.convolution.default: 0, _aten.convolution_backward.default: 1}
"""Where the input is among the arguments, and the weight behind it."""


def laid_out(mode: FakeTensorMode, func: Any, args: Any, result: Any) -> Any:
    """Channels last where the input or the weight has them so, and it is not in double precision
    (`cudnn_conv_suggest_memory_format` of `aten/src/ATen/native/ConvUtils.h`)."""
    place = _PLACES.get(func)
    if place is None or not torch.backends.cudnn.enabled:
        return result
    given: tuple[Tensor, Tensor] = args[place : place + 2]
    asked = [each for each in map(suggest_memory_format, given) if each in _LAST]
    if not asked or given[0].device.type != "cuda" or given[0].dtype is torch.float64:
        return result
    with mode:
        if isinstance(result, Tensor):
            return result.to(memory_format=asked[0])
        *gradients, bias = result
        return (*(each if each is None else each.to(memory_format=asked[0]) for each in gradients), bias)
