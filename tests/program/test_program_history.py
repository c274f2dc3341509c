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
    assert str(entry).startswith(f"decompose ({entry.options}): {entry.removed} gone, {entry.added} new, ")
    (by_hand,) = captured().apply(nothing).history
    assert (by_hand.options, by_hand.added, by_hand.removed) == ("", 0, 0)


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
    assert through_file(program, tmp_path).history == program.history
    assert [row["name"] for row in json.loads(program.to_json())["history"]] == ["dead code", "nothing"]
    older = with_data(content("joint"), lambda data: data.pop("history") and None)
    assert "history" not in json.loads(members(older)[PROGRAM])
    assert loaded(older, "an older file").history == ()
