"""What a page draws is what the reports say."""

from __future__ import annotations

import json

import torch
from torch import nn

import whence
from whence.reports.figures import figures_of


def test_figures_are_plain_data() -> None:
    """Costs by node, views with the node in whose memory they lie, what nodes make as `diff` spells it."""
    program = whence.capture(nn.Linear(4, 2), (torch.randn(3, 4),), backward=lambda y: y.sum())
    figures = json.loads(json.dumps(figures_of(program, "h100", values={"addmm": 1})))
    assert figures["device"] == "h100"
    costs = {
        cost.name: [cost.flops, cost.read, cost.written, cost.seconds] for cost in program.cost("h100").nodes
    }
    assert figures["costs"] == costs
    assert figures["bases"]["t"] == "p_weight"
    assert figures["made"]["addmm"] == "f32[3, 2]"
    assert figures["values"] == {"addmm": 1.0}
    assert figures["rows"] == program.report(device="h100").to_dict()["rows"]
