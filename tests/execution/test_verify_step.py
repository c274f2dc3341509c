"""A step that was loaded from a file is verified against the function and the optimizer that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import whence
from tests.tracing.steps.small import batch, small, zero_first, zero_last
from whence.errors import UsageError

X = (batch(),)


def saved(path: Path) -> Path:
    model, optimizer = small()
    step = zero_first(model, optimizer)
    whence.capture_step(step, X, model=model, optimizer=optimizer).save(path / "step.whence")
    return path / "step.whence"


@pytest.mark.parametrize("options", [{}, {"by": "call"}], ids=str)
def test_a_loaded_step_is_verified(options: dict[str, Any], tmp_path: Path) -> None:
    """Against another instance, which is left as it was; another function is found to be one."""
    model, optimizer = small()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    program = whence.load(saved(tmp_path), model=model)
    same, other = zero_first(model, optimizer), zero_last(model, optimizer)
    assert program.verify(model, X, optimizer=optimizer, step=same, **options).ok
    assert not program.verify(model, X, optimizer=optimizer, step=other, **options).ok
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state


def test_what_a_file_does_not_keep_is_asked_for(tmp_path: Path) -> None:
    """The function, the optimizer, or both; an optimizer of another class is refused, and another model's
    tensors."""
    model, optimizer = small()
    step = zero_first(model, optimizer)
    program = whence.load(saved(tmp_path), model=model)
    for given, missing in (
        ({}, "the function step and of the optimizer, a AdamW"),
        ({"optimizer": optimizer}, "the function step"),
        ({"step": step}, "the optimizer, a AdamW"),
    ):
        with pytest.raises(UsageError, match=f"the name alone of {missing}\n"):
            program.verify(model, X, **given)
    with pytest.raises(UsageError, match="captured with a AdamW, and the optimizer is a SGD"):
        program.verify(model, X, optimizer=SGD(model.parameters()), step=step)
    with pytest.raises(UsageError, match=r"are other tensors\n.*whence.load\(path, model=model\)"):
        whence.load(saved(tmp_path)).verify(model, X, optimizer=optimizer, step=step)


def test_a_step_of_no_step_is_refused() -> None:
    """A program of a forward has nothing to compare it with."""
    model, optimizer = small()
    with pytest.raises(UsageError, match="no training step"):
        whence.capture(model, X).verify(model, X, step=zero_first(model, optimizer))
