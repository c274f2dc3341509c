"""What Python asks a tensor about its device: answered as on the device, where C++ is told otherwise."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whence._torch.elsewhere.kernels import UNSAID
from whence._torch.elsewhere.target import Elsewhere

_TENSOR: Any = Tensor


def _is(kind: str, _elsewhere: Elsewhere, tensor: Tensor) -> bool:
    return tensor.device.type == kind


def _index(_elsewhere: Elsewhere, tensor: Tensor) -> int:
    return -1 if tensor.device.index is None else tensor.device.index


def _to(elsewhere: Elsewhere, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Where a tensor is to go to the device that it is on, the device is left out of it."""
    if not elsewhere.is_here(tensor.device):
        return UNSAID
    kept = [each for each in args if not _is_device(elsewhere, each)]
    named = {name: each for name, each in kwargs.items() if name != "device" or not elsewhere.is_here(each)}
    if len(kept) == len(args) and len(named) == len(kwargs):
        return UNSAID
    others = [each for each in (*kept, *named.values()) if not isinstance(each, bool)]
    if not others and not named.get("copy", False) and True not in kept[1:]:
        return tensor
    return tensor.to(*kept, **named)


def _is_device(elsewhere: Elsewhere, given: Any) -> bool:
    return isinstance(given, (str, torch.device)) and elsewhere.is_here(given)


def _cuda(elsewhere: Elsewhere, tensor: Tensor, device: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    stays = elsewhere.is_here(tensor.device) and (device is None or _is_number_of(elsewhere, device))
    return tensor if stays else UNSAID


def _is_number_of(elsewhere: Elsewhere, device: Any) -> bool:
    return device == elsewhere.device.index if isinstance(device, int) else elsewhere.is_here(device)


Answer = Callable[..., Any]
ANSWERS: Mapping[Any, Answer] = {
    _TENSOR.is_cuda.__get__: partial(_is, "cuda"),
    _TENSOR.is_cpu.__get__: partial(_is, "cpu"),
    _TENSOR.is_meta.__get__: partial(_is, "meta"),
    _TENSOR.get_device: _index,
    _TENSOR.to: _to,
    _TENSOR.cuda: _cuda,
}
