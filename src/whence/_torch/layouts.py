"""Memory layouts that fake kernels get wrong.

A fake tensor with other strides than the real kernel gives leads the model down another path: `reshape` is a
view in the capture and a copy in eager, or the other way round. Each rule says what the CPU kernel does.
"""

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten

# Which result follows the memory format of which argument: contiguous, or channels last, never a permutation.
_FOLLOWS: dict[Any, tuple[int, int]] = {
    aten.native_batch_norm.default: (0, 0),
    aten.native_batch_norm_backward.default: (0, 1),
}


def has_layout_rule(func: Any) -> bool:
    """Whether the fake kernel of an operator is corrected here."""
    return func in _FOLLOWS


def as_kernel_lays_out(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """`result` of a fake kernel with the strides that the real kernel gives."""
    rule = _FOLLOWS.get(func)
    if rule is None or not isinstance(result[rule[0]], Tensor):
        return result
    position, argument = rule
    found = result[position]
    expected = torch.empty_like(found, memory_format=suggest_memory_format(args[argument]))
    if expected.stride() == found.stride():
        return result
    return (*result[:position], expected, *result[position + 1 :])
