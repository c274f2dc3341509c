"""Dropout between recurrent layers, where sizes vary."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import whence

KINDS: dict[str, dict[str, Any]] = {
    "tanh": {},
    "relu": {"nonlinearity": "relu"},
    "both directions": {"bidirectional": True},
    "batch first": {"batch_first": True},
    "three layers": {"bias": False, "num_layers": 3},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "backward",
    [False, pytest.param(True, marks=pytest.mark.canary("torch.utils._sympy.interp.sympy_interp"))],
    ids=["forward", "joint"],
)
def test_dropout_between_layers_is_eagers(options: dict[str, Any], backward: bool) -> None:
    """PyTorch's decomposition drops nothing; the program draws what eager draws."""
    model = nn.RNN(6, 8, dropout=0.5, **{"num_layers": 2, **options})
    batch = 0 if model.batch_first else 1
    shapes = ({batch: Dim("batch")},)
    program = whence.capture(model, (torch.randn(4, 4, 6),), backward=backward, dynamic_shapes=shapes)
    for size in (4, 7):
        x = torch.randn(*((size, 4) if model.batch_first else (4, size)), 6)
        result = program.verify(model, (x,))
        assert result.ok, str(result)
    assert "dropout" in "".join(str(node.meta.get("torch_fn")) for node in program.nodes())


def test_what_the_decomposition_forgets() -> None:
    """Canary: when PyTorch's own decomposition drops something, ours can go."""
    decompositions = torch._decomp.core_aten_decompositions()
    gru = decompositions[torch.ops.aten.gru.input]
    weights, x, hidden = list(nn.GRU(2, 2, 2).parameters()), torch.ones(3, 1, 2), torch.zeros(2, 1, 2)
    outputs = [gru(x, hidden, weights, True, 2, p, True, False, False)[0] for p in (0.0, 0.9)]
    assert torch.equal(*outputs)
