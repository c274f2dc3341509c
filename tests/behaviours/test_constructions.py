"""What people write is eager bit for bit, in every grad mode, or refused by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import whence
from tests.behaviours.constructions import Construction, Kind, generators, seeded
from tests.behaviours.constructions_of_values import ROWS
from tests.checks import differing, gradients, state

EVERY = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def total(outputs: Any) -> Tensor:
    """A scalar in which every result takes part."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.float().sin().sum() for leaf in leaves]).sum()


def one_run(module: nn.Module, inputs: tuple[Any, ...], *, trains: bool, has_loss: bool) -> dict[str, Any]:
    """What a run from fixed seeds gives and leaves, gradients included."""
    seeded(3)
    with torch.set_grad_enabled(trains):
        result = module(*inputs)
        loss, result = result if has_loss else (total(result) if trains else None, result)
    if loss is not None:
        loss.backward()
    found = {f"output {at}": leaf for at, leaf in enumerate(tree_leaves(result))}
    found |= {f"input {at}": leaf for at, leaf in enumerate(tree_leaves(inputs))}
    found |= {f"gradient of {name}": gradient for name, gradient in gradients(module).items()}
    return found | generators() | state(module)


def compared(row: Construction, program: whence.Program, *, trains: bool, has_loss: bool) -> None:
    expected = one_run(row.make(), row.inputs(), trains=trains, has_loss=False)
    for module in (program.module(copy=True), program.unflatten(copy=True)):
        found = one_run(module, row.inputs(), trains=trains, has_loss=has_loss)
        assert differing(expected, found) == []


def refused(row: Construction, kind: Kind, *, of_run: bool) -> AbstractContextManager[Any]:
    """The block raises the refusal of this kind, if there is one of then."""
    refusal = row.refused.get(kind)
    if refusal is None or refusal.of_run != of_run:
        return nullcontext()
    return pytest.raises(refusal.error, match=refusal.words)


@pytest.mark.sample(30)
@EVERY
@pytest.mark.parametrize("captured", [True, False], ids=["with", "without"])
def test_forward(row: Construction, captured: bool) -> None:
    """Captured with gradients or without, run with or without: flat and as a tree."""
    model = row.make()
    seeded(3)
    with refused(row, "forward", of_run=False), torch.set_grad_enabled(captured):
        program = whence.capture(model, row.inputs(), decide=row.decide)
        for trains in (True, False):
            if row.asks_grad_mode and trains != captured:
                with torch.set_grad_enabled(trains):
                    if program.check(model, row.inputs()):  # nothing where the answer changes nothing
                        continue
            with refused(row, "forward", of_run=True) if trains else nullcontext():
                compared(row, program, trains=trains, has_loss=False)


@pytest.mark.sample(15)
@EVERY
def test_joint(row: Construction) -> None:
    """Forward and backward in one graph, run with gradients."""
    model = row.make()
    seeded(3)
    with refused(row, "joint", of_run=False):
        program = whence.capture(model, row.inputs(), backward=total, decide=row.decide)
        compared(row, program, trains=True, has_loss=True)
