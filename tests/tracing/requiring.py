"""Models that state what holds, in the words of Python; pytest writes assertions of its own tests anew."""

import torch
from torch import Tensor, distributions, nn


def asserts(_: nn.Module, x: Tensor) -> None:
    assert x.lt(5).all(), "too big"


def asserts_negated(_: nn.Module, x: Tensor) -> None:
    assert not x.ge(5).any()


def asserts_both(_: nn.Module, x: Tensor) -> None:
    assert (x < 5).all() and x.isfinite().all()


def asserts_comparison(_: nn.Module, x: Tensor) -> None:
    assert x.max() < 5


def asserts_item(_: nn.Module, x: Tensor) -> None:
    assert x.lt(5).all().item()


def asserts_with_torch(_: nn.Module, x: Tensor) -> None:
    torch._assert(x.lt(5).all(), "too big")


def raises(_: nn.Module, x: Tensor) -> None:
    if not x.lt(5).all():
        sizes = ", ".join(str(size) if size > 1 else "one" for size in x.shape)
        raise ValueError(f"too big: {sizes}")


def raises_of_two(_: nn.Module, x: Tensor) -> None:
    if x.ge(5).any() or x.isnan().any():
        raise ValueError


def validates(_: nn.Module, x: Tensor) -> None:
    distributions.Uniform(x, 5.0)


WAYS = (
    *(asserts, asserts_negated, asserts_both, asserts_comparison, asserts_item, asserts_with_torch),
    *(raises, raises_of_two, validates),
)
