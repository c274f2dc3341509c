"""What optimizers ask before they take many tensors at once: which device, and of what class each is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from whence._torch.patching import patched

_TYPES = "_foreach_supported_types"


@contextmanager
def grouped_as_there() -> Iterator[None]:
    """Inside the block fakes are grouped by the devices that they say, and taken for what they stand for."""
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        found = group(lists, with_indices)
        return {(_device_of(rows[0], key[0]), key[1]): rows for key, rows in found.items()}

    with (
        patched(torch._C, "_group_tensors_by_device_and_dtype", grouped),
        patched(optimizer, _TYPES, [*optimizer._foreach_supported_types, FakeTensor]),
        patched(_foreach_utils, _TYPES, [*_foreach_utils._foreach_supported_types, FakeTensor]),
    ):
        yield


def _device_of(lists: Any, told: torch.device) -> torch.device:
    """The device of the first tensor, where it is a fake; C++ has been told another."""
    first = lists[0][0]
    return first.device if isinstance(first, FakeTensor) else told
