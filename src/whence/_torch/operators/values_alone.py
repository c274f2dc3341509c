"""Singular values and eigenvalues alone: without derivatives PyTorch leaves the vectors out, which gives
other last bits, and takes fake tensors for what is differentiated.
"""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_WITHOUT_VECTORS = {aten._linalg_svd.default: (False, False), aten._linalg_eigh.default: ("L", False)}
"""Operators with what follows their first argument where they compute no vectors."""
_OF_VALUES: tuple[object, ...] = (
    *(torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.matrix_norm, torch.linalg.norm),
    *(torch.linalg.cond, torch.linalg.matrix_rank, torch.norm, torch.nuclear_norm, Tensor.norm),
)
"""Functions that want no vectors."""


_SVD: tuple[object, ...] = (torch.svd, Tensor.svd)


def of_values(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function itself; `svd` without vectors is the one of singular values."""
    wants = kwargs.get("compute_uv", args[2] if len(args) > 2 else True) if function in _SVD else True
    return function if wants else torch.linalg.svdvals


def without_vectors(operator: Any, function: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator that a torch function calls, as that calls it in eager mode."""
    rest = _WITHOUT_VECTORS.get(operator)
    if rest is None or function not in _OF_VALUES or (torch.is_grad_enabled() and args[0].requires_grad):
        return args
    return args[0], *(args[1:2] or rest[:1]), *rest[1:]
