"""What a value looks like in one call: shape and strides for the sizes of that call."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.program.arguments.open_sizes import at, shape_of, strides_of


@dataclass(frozen=True)
class TensorDescription:
    """The shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.shape, self.strides


def described_at(fake: Tensor, sizes: Mapping[str, int]) -> TensorDescription:
    """What a fake tensor stands for in a call with these sizes."""
    if not sizes:
        return TensorDescription(fake.shape, fake.stride(), fake.dtype)
    shape = tuple(at(size, sizes) for size in shape_of(fake))
    return TensorDescription(shape, tuple(at(size, sizes) for size in strides_of(fake)), fake.dtype)
