"""Export in every way there is, and compare a tree with eager."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import differing, state

WAYS = ("non-strict", "strict", "loaded", "decomposed")
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
BOTH_FRONTS = pytest.mark.parametrize("way", WAYS[:2])


def exported(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    way: str = "non-strict",
    dynamic_shapes: Any = None,
    preserved: Sequence[str] = (),
) -> ExportedProgram:
    """The exported program of a model: by either front end, saved and loaded, or decomposed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            model,
            args,
            kwargs,
            strict=way == "strict",
            dynamic_shapes=dynamic_shapes,
            preserve_module_call_signature=tuple(preserved),
        )
        if way == "loaded":
            return loaded(program)
        return program.run_decompositions({}) if way == "decomposed" else program


def loaded(program: ExportedProgram) -> ExportedProgram:
    """The program as it comes back from a file."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """What one run from a fixed seed returns, and leaves in its arguments and its state."""
    args, kwargs = copy.deepcopy((args, kwargs or {}))
    torch.manual_seed(3)
    leaves = tree_leaves(module(*args, **kwargs))
    found = {
        f"output {at}": leaf.detach() if isinstance(leaf, Tensor) else leaf for at, leaf in enumerate(leaves)
    }
    found |= {
        f"input {at}": leaf for at, leaf in enumerate(tree_leaves((args, kwargs))) if isinstance(leaf, Tensor)
    }
    return found | state(module) | {"names": list(module.state_dict())}


def is_eager(
    tree: nn.Module,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    runs: int = 2,
) -> None:
    """The tree gives eager's bits, in outputs, inputs and state, also when it runs again."""
    for _ in range(runs):
        assert differing(run(model, args, kwargs), run(tree, args, kwargs)) == []


def unflattened(program: ExportedProgram | whence.Program, *options: Any) -> Any:
    """The tree of a program, whose modules are reached by their names."""
    return whence.unflatten(program, *options)


def tree_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    way: str = "non-strict",
    dynamic_shapes: Any = None,
    preserved: Sequence[str] = (),
) -> Any:
    """The tree of an exported model, after it was compared with eager."""
    program = exported(
        copy.deepcopy(model), args, kwargs, way=way, dynamic_shapes=dynamic_shapes, preserved=preserved
    )
    tree = unflattened(program)
    is_eager(whence.unflatten(program), copy.deepcopy(model), args, kwargs)
    return tree


def program_of(model: nn.Module, args: tuple[Any, ...], **options: Any) -> whence.Program:
    """The program of an exported model."""
    return whence.from_exported_program(exported(model, args, **options))
