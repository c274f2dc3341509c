"""A bound step computes with the values outside of it that there are, or refuses the call by their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from tests.behaviours.marks_outside import ROWS
from tests.behaviours.values_outside import SAME, Row
from tests.checks import differing, state
from whence.errors import StaleCapture

CALLS = 6


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 4, generator=generator) for _ in range(CALLS)]


def eager(row: Row) -> list[tuple[Any, dict[str, Tensor]]]:
    """What each call returns and leaves."""
    scene, found = row.make(), []
    for number, x in enumerate(batches()):
        scene.change(number)
        result = scene.step(x).detach().clone()
        found.append((result, {name: held.clone() for name, held in state(scene.model).items()}))
    return found


@pytest.mark.sample(12)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_a_step_reads_outside_is_never_an_old_value(row: Row) -> None:
    """Each call gives eager's bits, up to the one that is refused for what has changed."""
    wanted, scene = eager(row), row.make()
    held: dict[str, Any] = {"model": scene.model, "optimizer": scene.optimizer}
    program = whence.capture_step(
        scene.step, (batches()[0],), decide="example" if row.decides else None, **held
    )
    run, refused = program.bind(scene.model, scene.optimizer), ""
    for number, x in enumerate(batches()):
        scene.change(number)
        before = {name: held.clone() for name, held in state(scene.model).items()}
        try:
            result = run(x)
        except StaleCapture as error:
            refused = str(error)
            assert differing(before, state(scene.model)) == []
            break
        assert torch.equal(result, wanted[number][0]), number
        assert differing(wanted[number][1], state(scene.model)) == [], number
    assert row.refused in refused if row.refused else refused == SAME
