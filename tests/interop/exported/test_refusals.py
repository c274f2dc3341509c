"""Exported programs that contradict themselves: everything is named at once, at its node."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import whence
from tests.program.small import Stack, stack_program

X = torch.randn(3, 4)


def exported() -> ExportedProgram:
    return copy.deepcopy(torch.export.export(Stack(), (X,)))


def operations(program: ExportedProgram) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def refused(program: ExportedProgram, message: str) -> str:
    with pytest.raises(whence.UnsupportedGraph, match=message) as caught:
        whence.from_exported_program(program)
    return str(caught.value)


def test_contradictory_scopes() -> None:
    """One module of two classes is shown at the node that says so."""
    program = exported()
    first, *_, last = operations(program)
    known = first.meta["nn_module_stack"]
    (*_, key) = known
    last.meta["nn_module_stack"] = {**known, key: (known[key][0], "torch.nn.modules.conv.Conv2d")}
    text = refused(program, "is a Linear to .* and a Conv2d to")
    assert f"{last.name}: f32[3, 2] = " in text and "^ layers.0.attention is a Linear" in text


def test_missing_scopes_are_inferred() -> None:
    """Operations about which nothing is said belong to who uses them, and say so."""
    program = exported()
    for node in operations(program)[1:3]:
        node.meta.pop("nn_module_stack")
    read = whence.from_exported_program(program)
    assert read.where(operations(program)[1].name).quality == "inferred"
    assert torch.equal(read.unflatten()(X), program.module()(X))


def test_signature_and_state_are_named_together() -> None:
    """An input that the signature does not have, and state that is missing, at their placeholders."""
    program = exported()
    del program.state_dict["head.weight"]
    next(iter(program.graph.nodes)).name = "renamed"
    text = refused(program, "the signature and the placeholders differ")
    assert "head.weight is in the signature and not in the state" in text
    assert "renamed: f32[4, 4] = placeholder\n      ^ the signature" in text
    assert "p_head_weight: f32[2, 4] = placeholder\n      ^ head.weight is in the signature" in text


def test_calls_are_shown_in_the_program() -> None:
    """Every argument that does not fit is named, and shown at its input; another structure is, too."""

    class Two(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left @ right

    program = whence.capture(Two(), (torch.randn(2, 3), torch.randn(3, 2)))
    for module in (program.module(), program.unflatten()):
        with pytest.raises(whence.CallError, match=r"args\[0\] was") as caught:
            module(torch.randn(4, 3), torch.ones(3, 2, dtype=torch.int64))
        text = str(caught.value)
        assert "left: f32[2, 3] = placeholder\n      ^ args[0] was f32[2, 3] at capture, is f32[4, 3]" in text
        assert (
            "right: f32[3, 2] = placeholder\n      ^ args[1] was f32[3, 2] at capture, is i64[3, 2]" in text
        )
        with pytest.raises(whence.CallError, match="missing a required argument: 'right'"):
            module([torch.randn(2, 3)])


def test_graph_edited_without_tracking() -> None:
    """Modules are not made of a graph with operations that come from nowhere."""
    program = stack_program()
    with program.graph.inserting_before(program.node("relu")):
        added = program.graph.call_function(torch.ops.aten.neg.default, (program.node("relu").args[0],))
    program.node("relu").args = (added,)
    with pytest.raises(whence.MalformedProgram, match=f"{added.name} has no origin") as caught:
        program.unflatten()
    assert f"^ {added.name} has no origin" in str(caught.value)
