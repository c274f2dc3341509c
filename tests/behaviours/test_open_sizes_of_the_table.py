"""Models of the table, captured once: at every admitted size the program is eager, bit for bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import backward_of, same_bits
from tests.models import MODEL_CASES, ModelCase
from tests.tracing import dynamic
from tests.tracing.dynamic import dynamic_case

QUICK = frozenset(
    {
        *("llama", "vit", "resnet", "shared_layer", "checkpoint"),
        *("inplace_activations", "cached_attention", "dict_to_dataclass", "aliased_outputs", "weight_norm"),
    }
)
"""Those that run by default; the others are in the conformance run."""
MODES = ("forward", "tangents", "loss")


def _rows() -> list[object]:
    return [
        pytest.param(
            row, mode, id=f"{row.name}-{mode}", marks=() if _is_quick(row, mode) else pytest.mark.slow
        )
        for row in MODEL_CASES
        for mode in MODES
    ]


def _is_quick(row: ModelCase, mode: str) -> bool:
    return row.name in QUICK and (mode == "loss" or row.name == "shared_layer")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("row", "mode"), _rows())
def test_program_is_eager_at_four_sizes(row: ModelCase, mode: str) -> None:
    """One capture verifies at four sizes, flat and as a tree."""
    case = dynamic_case(row)
    program = case.capture(backward_of(row, mode))
    model, *_ = case.call
    for args, kwargs in case.resized():
        result = program.verify(model, args, kwargs)
        assert result.ok or result.explained, str(result)
        flat, tree = (
            _outputs(program.module(copy=True), args, kwargs),
            _outputs(program.unflatten(copy=True), args, kwargs),
        )
        assert len(flat) == len(tree)
        assert all(map(same_bits, flat, tree))


def _outputs(module: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    args, kwargs = copy.deepcopy((args, kwargs))
    torch.manual_seed(3)
    return tree_leaves(module(*args, **kwargs))


@pytest.mark.slow
def test_the_batch_that_clip_fixes_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its contrastive loss counts rows with `len()`: both inputs are named with the line; the rest works."""
    monkeypatch.setattr(dynamic, "FIXED", frozenset())
    case = dynamic_case(next(row for row in MODEL_CASES if row.name == "clip"))
    with pytest.raises(whence.SpecialisedShapes) as caught:
        case.capture(backward=False)
    fixed = {str(each.dimension): each.allowed for each in caught.value.dimensions}
    assert fixed == {"dim 0 of `kwargs['input_ids']`": "2", "dim 0 of `kwargs['pixel_values']`": "2"}
    assert "modeling_clip.py" in str(caught.value)
    assert "took batch as a Python number (range(), len(), int(), an index)" in str(caught.value)
    assert "write x.shape[0] for len(x)" in str(caught.value)
    model, args, kwargs = case.call
    program = whence.capture(model, args, kwargs, dynamic_shapes=caught.value.suggested)
    assert program.verify(model, args, kwargs).ok
