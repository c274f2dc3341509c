"""Operators whose fake kernel asks which real kernel would run, and decides on sizes by that; or has none.

Fake convolutions ask for the backend to know the memory format of the result: oneDNN is not taken for a batch
below 16, for example. Which kernel runs is chosen anew in every run, by the program as by eager, so the
question is not to limit sizes. What the operator really requires of sizes is required here. A write in place
asks whether what it writes to overlaps with itself: eager refuses that, too, whatever the sizes.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from whence._torch.sizes.symbols import comparable, without_decisions

if TYPE_CHECKING:
    from whence._torch.sizes.environment import SizeEnvironment

aten = torch.ops.aten

# Where the input, the weight, whether it is transposed, and the groups are among the arguments.
_CONVOLUTIONS: dict[Any, tuple[int, int, int, int]] = {
    aten.convolution.default: (0, 1, 6, 8),
    aten.convolution_backward.default: (1, 2, 7, 9),
}


# The backward of resampling has no fake kernel for symbols; its result has the size of an argument.
_RESAMPLING = frozenset(
    getattr(aten, f"{name}_backward").default
    for name in (
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
        *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
        *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    )
)
_INPUT_SIZE = 2

# For an empty sequence eager takes another kernel; this one divides by its length, and the process ends.
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def has_own_fake(func: Any) -> bool:
    """Whether an operator has a rule here for what it gives on symbols."""
    return func in _CONVOLUTIONS or func in _RESAMPLING or func is _ATTENTION or _writes_in_place(func)


def run_on_symbols(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: "SizeEnvironment | None"
) -> Any:
    """What an operator gives; the choice of a real kernel decides nothing."""
    if func is _ATTENTION:
        if environment is not None:
            environment.require_filled(*(tensor.shape[-2] for tensor in args[:2]))
        return func(*args, **kwargs)
    if _writes_in_place(func):
        with _overlap_undecided(args, environment):
            return func(*args, **kwargs)
    if func in _RESAMPLING:
        with without_decisions(environment):
            layout = suggest_memory_format(args[0])
            return torch.empty(
                args[_INPUT_SIZE], dtype=args[0].dtype, device=args[0].device, memory_format=layout
            )
    tensor, weight, transposed, groups = (args[position] for position in _CONVOLUTIONS[func])
    taken = weight.shape[0] if transposed else weight.shape[1] * groups
    torch._check(tensor.shape[1] == taken)
    with without_decisions(environment):
        return func(*args, **kwargs)


@cache
def _writes_in_place(func: Any) -> bool:
    """Whether an operator writes what belongs at each place to its first argument."""
    written = func._schema.is_mutable and func._schema.name.endswith("_")
    return written and (func is aten.copy_.default or torch.Tag.pointwise in func.tags)


def _overlap_undecided(
    args: tuple[Any, ...], environment: "SizeEnvironment | None"
) -> AbstractContextManager[Any]:
    """Decides nothing where all tensors have the same sizes; otherwise some are broadcast to the first."""
    sizes = {comparable(value.shape) for value in args if isinstance(value, Tensor)}
    return without_decisions(environment) if len(sizes) == 1 else nullcontext()
