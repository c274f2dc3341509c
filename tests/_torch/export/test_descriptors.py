"""Canaries: what AOT autograd and Dynamo write on graphs."""

from contextlib import ExitStack

import pytest
import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    DummyAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch._aot_autograd.schemas import JointWithDescriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from whence._torch.export.descriptors import (
    DescribedValue,
    described,
    joint_parts,
    names_of_state,
    returned_structure,
)


@pytest.mark.canary(
    "torch._functorch._aot_autograd.descriptors.BufferAOTInput",
    "torch._functorch._aot_autograd.descriptors.GradAOTOutput",
    "torch._functorch._aot_autograd.descriptors.InputMutationAOTOutput",
    "torch._functorch._aot_autograd.descriptors.ParamAOTInput",
    "torch._functorch._aot_autograd.descriptors.PlainAOTInput",
    "torch._functorch._aot_autograd.descriptors.PlainAOTOutput",
    "torch._functorch._aot_autograd.descriptors.TangentAOTInput",
)
def test_descriptors_in_words() -> None:
    """Each kind that a program has a place for is described; any other by its name."""
    weight, result = ParamAOTInput("weight"), PlainAOTOutput(1)
    assert described(None) is None
    assert described(weight) == described(BufferAOTInput("weight")) == DescribedValue(state="weight")
    assert described(PlainAOTInput(2)) == DescribedValue(argument=2)
    assert described(result) == DescribedValue(result=1)
    assert described(TangentAOTInput(result)) == DescribedValue("tangent", result=1)
    assert described(GradAOTOutput(weight)) == DescribedValue("gradient", state="weight")
    assert described(InputMutationAOTOutput(weight)) == DescribedValue("mutation", state="weight")
    assert described(DummyAOTInput(0)) == DescribedValue(other="DummyAOTInput")


@pytest.mark.canary("torch._functorch._aot_autograd.schemas.JointWithDescriptors")
def test_joint_graph_is_described() -> None:
    """A joint graph carries them on its placeholders, and knows the structure of the result."""
    with ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, nn.Linear(2, 2), (torch.randn(3, 2),))
    assert isinstance(joint, JointWithDescriptors)
    parts = joint_parts(joint)
    assert parts is not None
    graph, spec = parts
    first = next(iter(graph.graph.nodes))
    assert described(first.meta["desc"]) == DescribedValue(state="weight")
    assert spec is not None and spec.num_leaves == 1
    assert joint_parts(graph) is None


@pytest.mark.canary("torch.fx.Graph._codegen")
def test_names_of_dynamo() -> None:
    """A graph of Dynamo's export has the structure of its result in `_codegen`, and names of state."""
    graph = torch._dynamo.export(nn.Linear(2, 2), aten_graph=False)(torch.randn(3, 2))[0]
    assert returned_structure(graph) is not None
    assert returned_structure(fx.symbolic_trace(nn.Linear(2, 2))) is None
    assert "weight" in names_of_state(graph).values()
