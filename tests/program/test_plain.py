"""What says itself as plain data says itself as JSON, too."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import whence
from whence.program.plain import AsJSON

X = torch.randn(6, 4)
NAMES = ["program", "report", "cost", "memory", "diff", "verification", "guards", "shapes"]


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_json(name: str) -> None:
    """As their plain data are, and nothing else."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    program = whence.capture(model, (X,), backward=lambda y: y.sum())
    answer = {
        "program": program,
        "report": program.report(),
        "cost": program.cost("h100"),
        "memory": program.memory(),
        "diff": program.diff(whence.capture(model, (X,))),
        "verification": program.verify(model, (X,)),
        "guards": program.guards,
        "shapes": program.shapes,
    }[name]
    assert isinstance(answer, AsJSON)
    data = answer.to_dict()
    said = {"schema": 1, **data} if isinstance(data, dict) else data
    assert json.loads(answer.to_json()) == json.loads(json.dumps(said))
    assert answer.to_json(indent=2).startswith("{\n  ")
