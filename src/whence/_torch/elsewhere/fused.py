"""Operators that update all parameters at once: PyTorch has rules on fakes for some of them, and would run
the kernels of others."""

from typing import Any

import torch

from whence._torch.fakes import FakeTensorMode, fake_like

aten = torch.ops.aten
_OPERATORS = (
    *(aten._fused_sgd, aten._fused_sgd_, aten._fused_adagrad, aten._fused_adagrad_),
    *(aten._fused_adam, aten._fused_adam_, aten._fused_adamw, aten._fused_adamw_),
)
FUSED = frozenset(getattr(operator, name) for operator in _OPERATORS for name in ("default", "tensor_lr"))


def updated(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What such an operator gives: nothing where it writes in place, else a tensor for each that is given."""
    rows = func._schema.returns
    if not rows:
        return None
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return tuple(
        [fake_like(mode, each, each.shape, each.stride()) for each in given[row.name.rpartition("_")[0]]]
        for row in rows
    )
