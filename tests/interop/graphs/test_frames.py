"""Origins of exported programs: who made an operation, on which line, and how sure that is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.interop.helpers import BOTH_FRONTS, EVERY_WAY, exported, loaded, program_of
from whence.interop.graphs.frames import segments

X = torch.arange(8.0).reshape(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@EVERY_WAY
def test_origins(way: str) -> None:
    """Every operation has its call, its line in the user's code, the phase, and an exact quality."""
    program = program_of(Model(), (X,), way=way)
    (node,) = program.select("blocks.1 :: aten.relu")
    origin = program.where(node)
    assert (str(origin.calls[0]), origin.calls[0].type, origin.phase, origin.quality) == (
        "blocks.1",
        "Block",
        "forward",
        "exact",
    )
    assert origin.source is not None
    assert Path(origin.source.file) == Path(__file__)
    assert origin.source.function == "forward"
    line = Path(__file__).read_text().splitlines()[origin.source.line - 1]
    assert line.strip() == "hidden = self.up(x).relu()"


@BOTH_FRONTS
def test_both_front_ends_and_whence_agree_on_the_calls(way: str) -> None:
    """The calls of an exported program are those that whence sees."""
    program, captured = program_of(Model(), (X,), way=way), whence.capture(Model(), (X,))
    assert str(program.calls) == str(captured.calls)
    rows = [(row.name, row.kind, row.path) for row in captured.signature.inputs]
    assert [(row.name, row.kind, row.path) for row in program.signature.inputs] == rows


def test_equal_calls_are_found() -> None:
    """Layers of an exported program are known as such."""
    (layers,) = program_of(Model(), (X,)).layers()
    assert str(layers).startswith("Block × 2: blocks.0, blocks.1")


def test_operation_of_a_pass_is_inferred() -> None:
    """An operation that a pass put in without a word belongs to those who use it, and its quality says so."""
    exported_program = exported(Model(), (X,))
    relu = next(node for node in exported_program.graph.nodes if node.name == "relu_1")
    with exported_program.graph.inserting_before(relu):
        made = exported_program.graph.call_function(torch.ops.aten.neg.default, relu.args)
    made.meta["val"] = relu.args[0].meta["val"]
    relu.replace_input_with(relu.args[0], made)
    program = whence.from_exported_program(exported_program)
    origin = program.where(made.name)
    assert (str(origin.calls[0]), origin.quality) == ("blocks.1", "inferred")


def test_verify_reads_an_exported_program() -> None:
    """`verify` compares an exported program with the model it came from."""
    torch.manual_seed(0)
    model = Model()
    assert whence.from_exported_program(exported(model, (X,))).verify(model, (X,)).ok


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("", ""),
        ("L['self'].layers.0", "layers.0"),
        ("L['self'].layers[0].mlp", "layers.0.mlp"),
        ("L__self__.layers.0", "layers.0"),
        ("_export_root.model.layers.0", "model.layers.0"),
        ("_export_root", ""),
        ("blocks['a'].x", "blocks.a.x"),
        ("model.self.x", "model.self.x"),
        ("layers.0.forward.__self__.mlp", "layers.0.mlp"),
    ],
)
def test_dialects_of_paths(raw: str, path: str) -> None:
    """Roots have no name, and brackets are segments."""
    assert str(segments(raw)) == path


class Regions(nn.Module):
    """A module inside of `no_grad`, and outside of it; running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.linear(x).sin()
        return self.norm(self.linear(x).cos() + y)


def known(program: whence.Program) -> set[tuple[str, str, str]]:
    """Each operator, the module that it is in, and how sure that is."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    origins = [program.where(node) for node in nodes]
    return {
        (str(node.target), str(origin.calls[0].path), str(origin.quality))
        for node, origin in zip(nodes, origins, strict=True)
    }


@pytest.mark.parametrize("strict", [False, True])
def test_quality_after_decompositions(strict: bool) -> None:
    """What came through is exact; what was decomposed, or stood in a region, says that it was deduced."""
    program = torch.export.export(Regions(), (torch.randn(2, 4),), strict=strict)
    assert {quality for _, _, quality in known(whence.from_exported_program(program))} == {"exact"}
    once, linear, parts = program.run_decompositions({}), "aten.linear.default", "aten.addmm.default"
    always = {
        ("aten.sin.default", "", "inferred"),  # of the region, the module around is known
        ("aten.cos.default", "", "exact"),
        ("aten.add.Tensor", "", "exact"),
        ("aten._native_batch_norm_legit_functional.default", "norm", "inferred"),
    }
    found = known(whence.from_exported_program(loaded(once)))
    assert always | {(linear, "", "inferred"), (linear, "linear", "exact")} <= found
    for decomposed in (program.run_decompositions(), once.run_decompositions()):
        found = known(whence.from_exported_program(decomposed))
        assert always | {(parts, "", "inferred"), (parts, "linear", "inferred")} <= found
