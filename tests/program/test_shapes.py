"""What `program.shapes` prints."""

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
