"""Every pass is an entry in the history of the program that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import fx, nn

import whence
from tests.interop.archive.mutations import PROGRAM, members, with_data
from tests.interop.archive.programs import content, through_file
from tests.program.small import sine_loss
from whence.captured import loaded
from whence.rewriting import CommonSubexpressions, DeadCode

X = torch.randn(3, 4)


def nothing(module: fx.GraphModule) -> None:
    """A pass of PyTorch's kind that changes nothing."""


def captured() -> whence.Program:
    return whence.capture(nn.Sequential(nn.Linear(4, 4), nn.GELU()), (X,), backward=sine_loss)


def test_passes_are_entries_in_order() -> None:
    """`apply`, `decompose` and `track`; the program of before has its own history."""
    program = captured()
    core = program.decompose("core")
    passed = core.apply(CommonSubexpressions(), DeadCode(), nothing)
    with passed.track("by hand") as edit:
        edit.graph.lint()
    names = [row.name for row in edit.program.history]
    assert names == ["decompose", "common subexpressions", "dead code", "nothing", "by hand"]
    assert program.history == () and len(core.history) == 1 and len(passed.history) == 4


def test_an_entry_says_what_a_pass_did() -> None:
    """The pass with its options, and how many operations it made, took away and left."""
    (entry,) = captured().decompose("core").history
    assert entry.options == "Decompose(table='core', name='decompose')"
    assert entry.added > 0 < entry.removed
    before, after = (
        sum(node.op == "call_function" for node in each.graph.nodes)
        for each in (captured(), captured().decompose("core"))
    )
    assert before - entry.removed + entry.added == entry.operations == after
    assert str(entry).startswith(f"decompose ({entry.options}): {entry.removed} gone, {entry.added} new, ")
    (by_hand,) = captured().apply(nothing).history
    assert (by_hand.options, by_hand.added, by_hand.removed) == ("", 0, 0)


def test_an_entry_says_which_operations_and_where() -> None:
    """By operator, with the calls; what is given another operator is gone, and new."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    program = whence.capture(model, (X,)).decompose("core")

    def tanh(module: fx.GraphModule) -> None:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
            node.target = torch.ops.aten.tanh.default

    history = program.apply(tanh).history
    changes = {change.operator: change for change in history[0].changes}
    linear, addmm = changes["aten.linear.default"], changes["aten.addmm.default"]
    assert (linear.removed, linear.added, linear.calls) == (2, 0, ("0", "1.0"))
    assert (addmm.removed, addmm.added, addmm.calls) == (0, 2, ("0", "1.0"))
    assert sum(change.added for change in history[0].changes) == history[0].added
    assert [(row.operator, row.removed, row.added, row.calls) for row in history[1].changes] == [
        ("aten.gelu.default", 1, 0, ("1.1",)),
        ("aten.tanh.default", 0, 1, ("1.1",)),
    ]


def test_an_operation_with_other_arguments_is_edited() -> None:
    """Constants and what it reads; that it reads what replaces another is the other's change."""
    program = whence.capture(nn.Sequential(nn.Softmax(-1), nn.Softmax(-1), nn.ELU()), (X,))

    def dims(module: fx.GraphModule) -> None:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int):
            node.update_arg(1, 0)

    def skips(module: fx.GraphModule) -> None:
        first, second = module.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)
        second.update_arg(0, first.args[0])

    def tanh(module: fx.GraphModule) -> None:
        (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.elu.default)
        with module.graph.inserting_before(node):
            new = module.graph.call_function(torch.ops.aten.tanh.default, node.args[:1])
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)

    edited = program.apply(dims, skips, tanh).history
    assert [(row.edited, row.added, row.removed) for row in edited] == [(2, 0, 0), (1, 0, 0), (0, 1, 1)]
    assert str(edited[0]) == "dims: 0 gone, 0 new, 2 edited, 3 operations"
    (change,) = edited[0].changes
    assert (change.operator, change.edited, change.calls) == ("aten.softmax.int", 2, ("0", "1"))
    assert "~2  aten.softmax.int  in 0, 1" in str(change)
    assert program.decompose("core").history[0].edited == 0


def test_it_prints_as_a_page() -> None:
    """A line for each pass, and below it one for each operator; notebooks show one that opens."""
    history = captured().decompose("core").apply(nothing).history
    lines = str(history).splitlines()
    assert lines[0] == f"  0  {history[0]}" and lines[-1] == f"  1  {history[1]}"
    assert "-1  aten.gelu" in str(history) or "aten.gelu_backward" in str(history)
    assert len(lines) == len(history) + len(history[0].changes)
    assert repr(history) == "<History: decompose, nothing>"
    assert str(captured().history) == "as it was captured"
    assert history._repr_html_().startswith("<details><summary><code>&lt;History: decompose")


def test_a_table_of_functions_is_told_in_short() -> None:
    """What a pass holds may be large."""
    aten = torch.ops.aten
    table = {
        getattr(aten, name).default: torch.relu for name in ("gelu", "tanh", "sin", "cos", "relu6", "elu")
    }
    (entry,) = whence.capture(nn.ReLU6(), (X,)).decompose(table).history
    assert entry.options.startswith("Decompose(") and len(entry.options) == 200


def test_it_is_kept_in_files_and_in_plain_data(tmp_path: Path) -> None:
    """A file that was written before there was one is read, and has none."""
    program = captured().apply(DeadCode(), nothing)
    program = program.decompose("core")
    after = through_file(program, tmp_path)
    assert after.history == program.history and str(after.history) == str(program.history)
    assert after.apply(nothing).history[:-1] == program.history
    assert [row["name"] for row in json.loads(program.to_json())["history"]] == [
        "dead code",
        "nothing",
        "decompose",
    ]
    older = with_data(content("joint"), lambda data: data.pop("history") and None)
    assert "history" not in json.loads(members(older)[PROGRAM])
    assert loaded(older, "an older file").history == ()
