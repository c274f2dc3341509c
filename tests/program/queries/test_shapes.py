"""What `program.shapes` prints."""

import io

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence


class Partly(nn.Module):
    """One of two inputs leads to the loss, and one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor, scale: float) -> dict[str, object]:
        self.unused(y)
        torch._check(x.shape[1] - 1 < 9)
        return {"out": self.used(x.sum(1, keepdim=True)) * scale, "nothing": None, "rows": x.shape[0]}


def test_the_page() -> None:
    """Names, rules with who made them, missing gradients in words, and gradients of parameters in a line."""
    model, (x, y) = Partly(), (torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True))
    shapes = ({0: Dim("rows"), 1: Dim.AUTO}, {0: Dim.AUTO}, None)
    program = whence.capture(model, (x, y, 2.0), dynamic_shapes=shapes, backward=lambda out: out["out"].sum())
    assert str(program.shapes).splitlines() == [
        "rows is dim 0 of `args[0]`",
        "x_1 is dim 1 of `args[0]`",
        "y_0 is dim 0 of `args[1]`",
        "input     args[0]            f32[rows, x_1]",
        *(line for line in str(program.shapes).splitlines() if "must be" in line),
        "input     args[1]            f32[y_0, 3]",
        "input     args[2]            float = 2.0",
        "loss      loss               f32[]",
        "output    output['out']      f32[rows, 2]",
        "output    output['nothing']  None",
        "output    output['rows']     int = rows",
        "gradient  args[0]            f32[rows, x_1]",
        "gradient  args[1]            none: nothing leads to it",
        "gradient  2 of parameters, each of the shape of its parameter",
        "gradient  none for unused.weight, unused.bias: nothing leads to it",
    ]
    assert "dim 1 of `args[0]` must be at most 9 (test_shapes.py:" in str(program.shapes)
    assert program.shapes["used.weight"].shape == (2, 1) and len(program.shapes) == 13


class Read(nn.Module):
    """Sizes that are given, doubled, a number, and found in a run."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.cat([x, x]) + y + z.sum(), x.new_zeros(rows), x[:, 0].nonzero()


ROWS = Dim("rows", min=2, max=9)
OPEN = ({0: ROWS}, {0: 2 * ROWS}, {0: ROWS}, Dim.DYNAMIC)
EXAMPLE = (torch.randn(3, 4), torch.randn(6, 4), torch.randn(3), 5)


def _page(program: whence.Program, names: dict[str, str]) -> list[str]:
    """The page, with symbols by the names that are given to where they come from."""
    page = str(program.shapes)
    for name, where in program.shapes.names:
        page = page.replace(name, next((short for key, short in names.items() if key in where), name))
    return page.splitlines()


def test_the_page_of_an_exported_program() -> None:
    """Open sizes of an export have names, ranges and relations, fresh or loaded; sizes of data are told."""
    exported = torch.export.export(Read(), EXAMPLE, dynamic_shapes=OPEN)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    names = {"dim 0 of `args[0]`": "rows", "`args[3]`": "count", "run": "found"}
    for read in (exported, torch.export.load(buffer)):
        program = whence.from_exported_program(read)
        assert _page(program, names) == [
            "rows is dim 0 of `args[0]`",
            "count is `args[3]`",
            "found is known once the program has run: at most 9",
            "input     args[0]    f32[rows, 4]",
            "                       dim 0 of `args[0]` must be at most 9 (the capture)",
            "input     args[1]    f32[2*rows, 4]",
            "                       dim 0 of `args[1]` must be 2*rows, "
            "where rows is dim 0 of `args[0]` (the capture)",
            "input     args[2]    f32[rows]",
            "                       dim 0 of `args[2]` must be what dim 0 of `args[0]` is (the capture)",
            "input     args[3]    int = count",
            "output    output[0]  f32[2*rows, 4]",
            "output    output[1]  f32[count]",
            "output    output[2]  i64[found, 1]",
        ]
        told = program.shapes.to_dict()
        assert set(told["sizes"].values()) == {where for _, where in program.shapes.names}
        assert [rule["words"] for rule in told["rows"][0]["rules"]] == ["at most 9"]


def test_the_page_of_a_half() -> None:
    """A size that only its double shows is read from it, as in a capture of our own."""
    doubled = ({0: 2 * Dim("half", min=2, max=9)},)
    captured = whence.capture(nn.ReLU(), (torch.randn(8),), dynamic_shapes=doubled)
    exported = torch.export.export(nn.ReLU(), (torch.randn(8),), dynamic_shapes=doubled)
    strict = whence.capture(nn.ReLU(), (torch.randn(8),), dynamic_shapes=doubled, strict=True)
    assert _words(strict) == _words(captured) == ["of the form 2*half", "at least 4", "at most 18"]
    for program in (whence.from_exported_program(exported), strict):  # PyTorch checks no bound below 3
        assert {*_words(program)} >= {"of the form 2*half", "at most 18"}
        assert _page(program, {"over 2": "half"})[0] == str(captured.shapes).splitlines()[0]


def test_the_page_of_a_capture_that_was_exported() -> None:
    """The size keeps its name and its range, which a tree keeps under a compiler, too."""
    captured = whence.capture(nn.ReLU(), (torch.randn(3, 4),), dynamic_shapes=({0: ROWS},))
    again = whence.from_exported_program(captured.to_exported_program())
    assert again.shapes.names == captured.shapes.names == (("rows", "dim 0 of `args[0]`"),)
    assert _words(captured) == ["at least 2", "at most 9"] and _words(again) == ["at most 9"]
    compiled = torch.compile(whence.unflatten(again), fullgraph=True, backend="eager")
    assert compiled(torch.ones(9, 4)).sum() == 36
    with pytest.raises(Exception, match="do not fit the capture"):
        compiled(torch.ones(11, 4))


def _words(program: whence.Program) -> list[str]:
    names = [name for name, _ in program.shapes.names]
    return [rule.words.replace(names[0], "half") for rule in program.shapes["args[0]"].rules]
