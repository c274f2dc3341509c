"""Formulas over open sizes are what memory takes at any."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from tests.models import case

X = torch.randn(6, 4)
ROWS = ({0: Dim("rows", min=1)},)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "t5"])
def test_formulas_are_what_is_counted_at_any_sizes(name: str) -> None:
    """Kept bytes, and the peak: the largest of what is alive at the places that can have it."""
    found = case(name)
    model, args, kwargs = found.make()
    batch, length = Dim("batch", min=2), Dim("length", min=2, max=64)
    free = {0: batch} if name == "vit" else {0: batch, 1: length}
    shapes = {key: free if isinstance(value, Tensor) else None for key, value in kwargs.items()}
    if name == "t5":
        shapes["labels"] = {0: batch, 1: Dim("wanted", min=2, max=64)}
    if name == "vit":
        shapes["labels"] = {0: batch}
    program = whence.capture(model, args, kwargs, backward=found.loss, dynamic_shapes=shapes)
    memory = program.memory()
    names = [name for name, _ in program.shapes.names]
    for batches, tokens, wanted in ((2, 2, 2), (3, 17, 5), (64, 4, 60), (2, 8, 6), (2, 64, 3), (512, 64, 64)):
        sizes = {"batch": batches, "length": tokens, "wanted": wanted}
        sizes = {key: size for key, size in sizes.items() if key in names}
        counted = program.memory(sizes=sizes)
        assert eval(memory.formulas["kept bytes"], dict(sizes)) == counted.kept_bytes
        assert max(eval(text, dict(sizes)) for text in memory.peaks.values()) == counted.peak


def test_a_peak_at_one_place_is_a_formula() -> None:
    """Of a chain of equal steps: wherever sizes are, the peak is at the first that has all beside it."""
    memory = whence.capture(nn.Sequential(nn.ReLU(), nn.Tanh()), (X,), dynamic_shapes=ROWS).memory()
    assert memory.formulas == {"kept bytes": "0", "peak bytes": "48*rows"}
    assert "peak bytes: 48*rows" in str(memory)
    assert memory.to_dict()["peaks"] == dict.fromkeys(memory.peaks, "48*rows")


def test_formulas_are_only_there_where_all_is_known() -> None:
    """None where no size is open; no peak of graphs inside, or with measured kernels; several are said."""
    linear = nn.Linear(4, 8)
    assert whence.capture(linear, (X,)).memory().formulas == {}
    branch = whence.capture(
        lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x.sin(), (x,)), (X,), dynamic_shapes=ROWS
    ).memory()
    assert branch.peaks == {} and set(branch.formulas) == {"kept bytes"}
    opened = whence.capture(linear, (X,), backward=lambda y: y.sin().sum(), dynamic_shapes=ROWS)
    assert opened.memory(measure=True).peaks == {}
    several = opened.memory()
    assert len(several.peaks) > 1 and "peak bytes" not in several.formulas
    assert f"the peak is at one of {len(several.peaks)} places" in str(several)
