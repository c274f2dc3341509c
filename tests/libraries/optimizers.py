"""Optimizers of libraries, each on one small model."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn, randn
from torch.optim import Optimizer

import whence
from tests.libraries.rows import Rows, given, library_called, refused

row = Rows()


def perceptron(_library: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def made(library: str, name: str, settings: dict[str, Any], model: nn.Module) -> Optimizer:
    return getattr(library_called(library), name)(model.parameters(), **settings)


def add(library: str, name: str, *, details: dict[str, Any] | None = None, **settings: Any) -> None:
    """A row of an optimizer: the steps alone say something about it."""
    build = partial(perceptron)
    build.__name__ = name.lower()  # type: ignore[attr-defined]
    only = dict.fromkeys(("forward", "joint"), "the model is an ordinary one")
    optimizer: Callable[[nn.Module], Optimizer] = partial(made, library, name, settings)
    row(library, lambda: given(randn(3, 8)), without=only, make_optimizer=optimizer, **(details or {}))(build)


add("lion_pytorch", "Lion", lr=1e-3, weight_decay=0.1)
COMPARED = refused(
    whence.DataDependent,
    "a branch",
    "what it computes depends on whether a norm or a gradient is zero",
    "steps",
)
for _name in ("Lion", "AdaBelief", "RAdam", "AdaFactor", "Yogi", "LaProp", "Amos", "Tiger", "StableAdamW"):
    add("pytorch_optimizer", _name)
add("pytorch_optimizer", "ScheduleFreeAdamW")
for _name in ("SOAP", "AggMo", "MADGRAD", "Conda"):
    add("pytorch_optimizer", _name)
for _name in ("AdamP", "Prodigy"):
    add("pytorch_optimizer", _name, details=COMPARED)
