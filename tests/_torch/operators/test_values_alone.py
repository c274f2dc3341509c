"""Singular values and eigenvalues are computed as eager computes them, with and without gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import whence

ASKED: dict[str, Callable[[Tensor], Any]] = {
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.T),
    "eigvalsh of the upper half": lambda x: torch.linalg.eigvalsh(x @ x.T, UPLO="U"),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "norm": lambda x: torch.linalg.norm(x, 2),
    "nuclear": lambda x: torch.norm(x, p="nuc"),
    "method": lambda x: x.norm("nuc"),
    "cond": torch.linalg.cond,
    "svd without vectors": lambda x: torch.svd(x, compute_uv=False)[1],
    "method without vectors": lambda x: x.svd(True, False)[1],
    "rank": torch.linalg.matrix_rank,
    "svd": torch.linalg.svd,
    "eigh": lambda x: torch.linalg.eigh(x @ x.T),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_values_are_eager_s(name: str, requires_grad: bool) -> None:
    """Bit for bit, for ten matrices; joint programs of what has a gradient, too."""
    torch.manual_seed(0)
    for _ in range(10):
        x = torch.randn(5, 6).requires_grad_(requires_grad)
        assert whence.capture(ASKED[name], (x,)).verify(ASKED[name], (x,)).ok
    if requires_grad and name not in ("rank", "eigh", "svd"):
        assert whence.capture(ASKED[name], (x,), backward=torch.sum).verify(ASKED[name], (x,)).ok
    with torch.no_grad():
        program = whence.capture(ASKED[name], (x,))
        assert program.verify(ASKED[name], (x,)).ok
