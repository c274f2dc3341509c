"""What a row of the table of libraries is, and how a file of rows writes one."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import whence
from tests.models import Inputs, ModelCase, mean_sines

Kind = Literal["forward", "joint", "steps"]
KINDS: tuple[Kind, ...] = ("forward", "joint", "steps")
Build = Callable[..., nn.Module]
OWN_FUNCTION = "it runs an autograd function of its own, whose backward is not in a program of a forward"


@dataclass(frozen=True)
class Refusal:
    """The error that whence has to raise, a pattern of its message, and why refusing is right."""

    error: type[whence.WhenceError]
    match: str
    why: str


@dataclass(frozen=True)
class LibraryCase:
    """A construction from libraries: bitwise in every kind that it does not say is refused or absent.

    `libraries` are imported in this order and given to the builder; `without` says which kinds there are not
    and why, as for a model without parameters; `forward_alone` why a program of its forward is run without
    gradients; `make_optimizer` makes another optimizer than AdamW. Of the kinds that are refused because
    values decide, those of `decide` are bitwise where the example decides.
    """

    case: ModelCase
    libraries: tuple[str, ...]
    refused: Mapping[Kind, Refusal] = field(default_factory=dict)
    without: Mapping[Kind, str] = field(default_factory=dict)
    forward_alone: str = ""
    make_optimizer: Callable[[nn.Module], Optimizer] | None = None
    decide: tuple[Kind, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.libraries[0]}-{self.case.name}"

    @property
    def is_installed(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> list[str]:
        return [name for name in self.libraries if not is_installed(name)]

    def expected(self, kind: Kind) -> AbstractContextManager[Any]:
        """The block raises the refusal of this kind, if there is one."""
        refusal = self.refused.get(kind)
        return nullcontext() if refusal is None else pytest.raises(refusal.error, match=refusal.match)


def is_installed(library: str) -> bool:
    """Whether the package of a dotted name is there, without importing it."""
    return importlib.util.find_spec(library.partition(".")[0]) is not None


@dataclass(frozen=True)
class Rows:
    """The rows of one file, added to by a decorator on the function that builds the model."""

    written: list[LibraryCase] = field(default_factory=list)

    def __call__(
        self,
        libraries: str,
        inputs: Callable[[], Inputs],
        *,
        warm: str = "",
        tags: frozenset[str] = frozenset(),
        **details: Any,
    ) -> Callable[[Build], Build]:
        """The decorated function takes the libraries, named with spaces between, and returns the model.

        `warm` says why the model has run once before it is captured.
        """

        def add(build: Build) -> Build:
            names = tuple(libraries.split())
            made = partial(_built, build, names, inputs if warm else None)
            case = ModelCase(build.__name__, made, inputs, any_loss, training=True, tags=tags)
            self.written.append(LibraryCase(case, names, **details))
            return build

        return add


def given(*args: Any, **kwargs: Any) -> Inputs:
    """Arguments as they are spelled in a call."""
    return args, kwargs


def any_loss(outputs: Any) -> Tensor:
    """A scalar in which every differentiable output takes part."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return mean_sines([torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves])


def refused(error: type[whence.WhenceError], match: str, why: str, *kinds: Kind) -> dict[str, Any]:
    """The kinds that are refused, all unless some are named, as a detail of a row."""
    return {"refused": dict.fromkeys(kinds or KINDS, Refusal(error, match, why))}


def decided(match: str, why: str, *kinds: Kind, decide: tuple[Kind, ...]) -> dict[str, Any]:
    """The kinds in which values decide, and those that are right where the example does."""
    return {**refused(whence.DataDependent, match, why, *kinds), "decide": decide}


def untrained(why: str) -> dict[str, Any]:
    """A model that has nothing to train: the forward alone, as a detail of a row."""
    return {"without": {"joint": why, "steps": why}}


class Applied(nn.Module):
    """A function of a library as a module; the parts are modules that the function is given first."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.parts, *args, **kwargs)


def _built(build: Build, names: tuple[str, ...], first: Callable[[], Inputs] | None) -> nn.Module:
    modules = [library_called(name) for name in names]
    random.seed(0)  # some draw their first numbers from Python
    model = build(*modules)
    if first is not None:
        args, kwargs = first()
        model(*args, **kwargs)
    return model


def library_called(name: str) -> Any:
    """The module of this dotted name."""
    if is_installed("torchvision"):  # which many others import, and those that do not where it fails
        _load_torchvision()
    return importlib.import_module(name)


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def _load_torchvision() -> None:
    """PyPI's wheel holds operators for CUDA builds of torch: on a CPU build name those it asks for at once.

    Nothing in the table runs them.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
