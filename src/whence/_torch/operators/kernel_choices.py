"""Operators whose fake kernel asks which real kernel would run, and decides on sizes by that; or has none.

Fake convolutions ask for the backend to know the memory format of the result: oneDNN is not taken for a batch
below 16, for example. Which kernel runs is chosen anew in every run, by the program as by eager, so the
question is not to limit sizes. What the operator really requires of sizes is required here. A write in place
asks whether what it writes to overlaps with itself: eager refuses that, too, whatever the sizes.
"""

from collections.abc import Callable
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
_INPUT_SIZE = 2
SymbolRule = Callable[[Any, tuple[Any, ...], dict[str, Any], "SizeEnvironment | None"], Any]
"""What an operator gives on arguments with open sizes; the choice of a real kernel decides nothing."""


def convolution(tensor: int, weight: int, transposed: int, groups: int) -> SymbolRule:
    """The positions of the input, the weight, whether it is transposed, and the groups."""

    def rule(
        func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: "SizeEnvironment | None"
    ) -> Any:
        kernel = args[weight]
        taken = kernel.shape[0] if args[transposed] else kernel.shape[1] * args[groups]
        torch._check(args[tensor].shape[1] == taken)
        with without_decisions(environment):
            return func(*args, **kwargs)

    return rule


def resampling_backward(
    _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], environment: "SizeEnvironment | None"
) -> Any:
    """It has no fake kernel for symbols; its result has the size of an argument."""
    with without_decisions(environment):
        layout = suggest_memory_format(args[0])
        size = args[_INPUT_SIZE]
        return torch.empty(size, dtype=args[0].dtype, device=args[0].device, memory_format=layout)


def attention_on_cpu(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: "SizeEnvironment | None"
) -> Any:
    """For an empty sequence eager takes another kernel; this one divides by its length: the process ends."""
    if environment is not None:
        environment.require_filled(*(tensor.shape[-2] for tensor in args[:2]))
    return func(*args, **kwargs)


def write_in_place(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: "SizeEnvironment | None"
) -> Any:
    """Whether what is written to overlaps with itself is not to be asked."""
    with _overlap_undecided(args, environment):
        return func(*args, **kwargs)


@cache
def writes_in_place(func: Any) -> bool:
    """Whether an operator writes what belongs at each place to its first argument."""
    written = func._schema.is_mutable and func._schema.name.endswith("_")
    return written and (func is aten.copy_.default or torch.Tag.pointwise in func.tags)


def _overlap_undecided(
    args: tuple[Any, ...], environment: "SizeEnvironment | None"
) -> AbstractContextManager[Any]:
    """Decides nothing where all tensors have the same sizes; otherwise some are broadcast to the first."""
    sizes = {comparable(value.shape) for value in args if isinstance(value, Tensor)}
    return without_decisions(environment) if len(sizes) == 1 else nullcontext()
