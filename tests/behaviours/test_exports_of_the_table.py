"""The table of models through torch.export and back: equal to eager, bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.checks import differing, state
from tests.interop.helpers import exported, unflattened
from tests.models import MODEL_CASES, ModelCase

QUICK = ("bert", "llama", "lstm", "unet", "tied_language_model", "running_statistics", "autocast")
NOT_STRICT = frozenset(
    [
        "llama_checkpoint",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "segformer",
        "checkpoint",
        "checkpoint_dropout",
        "energy_forces",
    ]
)
"""What the strict front end of PyTorch 2.13 refuses."""
ROWS = [
    pytest.param(row, way, id=f"{row.name}-{way}", marks=() if row.name in QUICK else pytest.mark.slow)
    for row in MODEL_CASES
    for way in ("non-strict", "strict", "decomposed")
    if "no_export" not in row.tags and not (way == "strict" and row.name in NOT_STRICT)
]


def one_run(module: nn.Module, row: ModelCase) -> dict[str, Any]:
    """What one run from a fixed seed returns and leaves behind."""
    _, args, kwargs = row.make()
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaves = tree_leaves(module(*args, **kwargs))
    found = {f"output {at}": leaf for at, leaf in enumerate(leaves)}
    found |= {f"input {at}": leaf for at, leaf in enumerate(tree_leaves((args, kwargs)))}
    return found | state(module) | {"names": list(module.state_dict())}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("row", "way"), ROWS)
def test_model_of_the_table(row: ModelCase, way: str) -> None:
    """An exported model unflattens into eager's outputs, state and names.

    The strict front end forgets non-persistent buffers that nothing uses.
    """
    model, args, kwargs = row.make()
    tree = unflattened(exported(model, args, kwargs, way=way))
    original, *_ = row.make()
    expected, found = one_run(original, row), one_run(tree, row)
    unused = set() if way != "strict" else {*expected} - {*found}
    assert unused <= {name for name, _ in original.named_buffers()} - {*original.state_dict()}
    assert [name for name in differing(expected, found) if name not in unused] == []
