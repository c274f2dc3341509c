"""Programs of which files are kept for good.

`python -m tests.interop.archive.releases FOLDER NAME...` writes some, for another release. Files of `files/`
are never written anew: what an earlier release of PyTorch, or of whence, wrote has to load.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch.export import Dim

import whence

FILES = Path(__file__).parent / "files"


class Doubled(torch.autograd.Function):
    """A function with a derivative of its own, which is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Twice the sine."""
        ctx.save_for_backward(x)
        return x.sin() * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Three times the cosine."""
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos() * 3


class Custom(nn.Module):
    """A layer, and a function of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return Doubled.apply(self.lin(x)).cos()


class Nested(Custom):
    """A branch, and a map."""

    def forward(self, x: Tensor) -> Any:
        x = torch.cond(x.sum() > 0, lambda x: self.lin(x).sin(), lambda x: x.cos(), (x,))
        return mapped(_row, x)


def _row(row: Tensor, *_others: Any) -> Tensor:
    return row.tanh() * 2


class Scan(Custom):
    """A loop over rows."""

    def forward(self, x: Tensor) -> Any:
        x = self.lin(x)
        total, rows = scan(_added, x[0].clone(), x, dim=0)
        return total + rows


def _added(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    return carried + row, carried * row


class Decided(Custom):
    """A branch that values decide."""

    def forward(self, x: Tensor) -> Any:
        x = self.lin(x)
        return x.relu() if x.sum() > -1000 else x


def layers() -> nn.Module:
    """Two layers, a normalisation, an activation."""
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))


X = torch.linspace(-1, 1, 12).view(3, 4)


def _loss(result: Tensor) -> Tensor:
    return result.square().mean()


def _joint(model: nn.Module, **options: Any) -> whence.Program:
    return whence.capture(model, (X,), backward=_loss, **options)


def _step() -> whence.Program:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def training(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return whence.capture_step(training, (X,), model=model, optimizer=optimizer)


KINDS = {
    "forward": lambda: whence.capture(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU()), (X,)),
    "joint": lambda: _joint(layers()),
    "step": _step,
    "sizes": lambda: _joint(layers(), dynamic_shapes=({0: Dim("rows", min=2, max=64)},)),
    "decided": lambda: _joint(Decided(), decide="example"),
    "nested": lambda: _joint(Nested()),
    "scan": lambda: _joint(Scan()),
    "custom": lambda: _joint(Custom()),
}


def results(program: whence.Program, state: Mapping[str, Tensor]) -> dict[tuple[str, str], Any]:
    """What a program computes of this state, by kind and path; the numbers of an optimizer are made up."""
    given = [_given(row, state) for row in program.signature.inputs]
    with torch.no_grad():
        values = fx.Interpreter(program.graph_module).run(*given)
    listed: Any = program.graph.output_node().args[0]
    held = {node.name: value for node, value in zip(listed, values, strict=True) if isinstance(node, fx.Node)}
    rows = program.signature.outputs
    return {(row.kind.value, row.path): held[row.node] for row in rows if row.node in held}


def _given(row: Any, state: Mapping[str, Tensor]) -> Any:
    if row.name in state:
        return state[row.name].detach().clone()
    if row.kind.value == "user":
        return X.clone()
    return (
        torch.full(tuple(row.value.shape), 0.5, dtype=row.value.dtype)
        if isinstance(row.value, Tensor)
        else 0.5
    )


def main(folder: Path, *names: str) -> None:
    """Write the files of these programs, named for the release that runs."""
    release = str(torch.__version__).partition("+")[0]
    for name in names:
        torch.manual_seed(0)
        KINDS[name]().save(folder / f"{release}-{name}.whence")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
