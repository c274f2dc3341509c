"""Small programs of every kind, and a way through a file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from tests.tracing.steps.small import batch, small, zero_first

X = torch.randn(3, 4)


class Branching(nn.Module):
    """A branch that values decide, with a weight inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.inner(x).sin(), lambda x: x.cos(), (x,))


class Noting(nn.Module):
    """A constant of its own, a buffer that every call changes, and structured results."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.kept = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor, *, factor: float = 2.0) -> dict[str, Any]:
        self.seen += 1
        return {"scaled": x * self.scale * factor, "rest": (x.sum() + self.kept, None, 3)}


def sine(result: Tensor) -> Tensor:
    """A loss."""
    return result.sin().sum()


def layered() -> nn.Sequential:
    """Equal layers, and normalisation with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))


def _step() -> whence.Program:
    model, optimizer = small()
    return whence.capture_step(zero_first(model, optimizer), (batch(),), model=model, optimizer=optimizer)


def _sized() -> whence.Program:
    rows = Dim("rows", min=2, max=64)
    return whence.capture(layered(), (X,), backward=sine, dynamic_shapes=({0: rows},))


def _data_sized() -> whence.Program:
    return whence.capture(lambda x: x[x > 0].sum() + x.nonzero().shape[0], (X,))


class Single(nn.Module):
    """One row has a way of its own, with another layer and another constant."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.single = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return self.single(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.usual(x) * torch.tensor([4.0, 3.0, 2.0, 1.0])


def _with_variants() -> whence.Program:
    rows = ({0: Dim("rows")},)
    return whence.capture(Single(), (X,), backward=sine, dynamic_shapes=rows, variants=True)


KINDS = {
    "forward": lambda: whence.capture(layered(), (X,)),
    "joint": lambda: whence.capture(layered(), (X,), backward=sine),
    "tangents": lambda: whence.capture(layered(), (X,), backward=True),
    "attributes": lambda: whence.capture(layered(), (X,), state="attributes"),
    "sizes": _sized,
    "sizes of data": _data_sized,
    "branch": lambda: whence.capture(Branching(), (X,)),
    "branch, joint": lambda: whence.capture(Branching(), (X,), backward=sine),
    "step": _step,
    "constants": lambda: whence.capture(Noting(), (X,)),
    "preserved": lambda: whence.capture(layered(), (X,), preserve_calls="0"),
    "decomposed": lambda: whence.capture(layered(), (X,)).decompose(),
    "variants": _with_variants,
    "exported": lambda: whence.from_exported_program(torch.export.export(layered().eval(), (X,))),
}


@cache
def program(kind: str) -> whence.Program:
    """The program of that kind, made once."""
    return KINDS[kind]()


@cache
def content(kind: str) -> bytes:
    """The file of that program."""
    return whence.interop.bytes_of(program(kind), weights=True)


def through_file(given: whence.Program, folder: Path, **options: Any) -> whence.Program:
    """The program from a file, with what `load` is to be given."""
    path = folder / "program.whence"
    given.save(path, weights=options.pop("weights", True))
    return whence.load(path, **options)
