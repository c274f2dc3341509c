"""Programs as plain data are JSON, and say what the program says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import whence
from tests.models import case

X = torch.randn(3, 4)


def names_in(value: Any) -> set[str]:
    """The nodes that plain data name."""
    if isinstance(value, dict):
        own = {value["node"]} if set(value) == {"node"} else set()
        return own.union(*map(names_in, value.values()))
    return set().union(*map(names_in, value)) if isinstance(value, list) else set()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", "running_statistics", "checkpoint"])
def test_training_steps_of_models(name: str) -> None:
    """Every node, call and row of the signature; what arguments name is there."""
    found = case(name)
    model, args, kwargs = found.make()
    program = whence.capture(model, args, kwargs, backward=found.loss)
    data = json.loads(program.to_json())
    assert [node["name"] for node in data["nodes"]] == [node.name for node in program.graph.nodes]
    assert [row["name"] for row in data["inputs"]] == [row.name for row in program.signature.inputs]
    assert len(data["calls"]) == len(program.calls) + 1 and data["calls"][0]["parent"] is None
    assert len(data["guards"]["guards"]) == len(program.guards)
    known = {node["name"] for node in data["nodes"]}
    assert names_in(data["nodes"]) | names_in(data["calls"]) <= known
    backward = [node for node in data["nodes"] if node["origin"]["phase"] == "backward"]
    assert any(node["origin"]["forward"] in known for node in backward)
    assert any(node["origin"]["gradient"] in known for node in data["nodes"])


def test_what_json_has_no_word_for() -> None:
    """Infinities, slices, dtypes, open sizes, branches."""

    def function(x: torch.Tensor) -> torch.Tensor:
        masked = x.masked_fill(x > 0, float("-inf")).to(torch.float64)
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (masked,))

    program = whence.capture(function, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    text = program.to_json(indent=1)
    nodes = json.loads(text)["nodes"]
    assert {"number": "-inf"} in nodes[[node["target"] for node in nodes].index("aten.masked_fill.Scalar")][
        "args"
    ]
    assert '"dtype": "float64"' in text and '"size": "rows"' in text
    assert any("graph" in node and node["graph"] for node in nodes)


def test_state_as_attributes_and_constants() -> None:
    """Rows that are no placeholders are there, too."""
    program = whence.capture(nn.Linear(4, 2), (X,), state="attributes")
    data = program.to_dict()
    assert [row["path"] for row in data["attributes"]] == ["weight", "bias"]
    assert [row["kind"] for row in data["inputs"]] == ["user"]
