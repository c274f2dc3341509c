"""Example inputs become flat leaves with names and paths."""

import enum
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.recording import is_wrapper_subclass
from whence._torch.trees import TreeSpec, tree_flatten, tree_unflatten
from whence.errors import InputMismatch, UnsupportedInput
from whence.program.convention import names_of, paths_of
from whence.tracing.subject import Subject

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator, nn.Module),
)


@dataclass(frozen=True)
class Example:
    """The inputs a capture runs on: their structure, and for every leaf its value, path and name."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    names: tuple[str, ...]

    def with_leaves(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` of the same structure over other leaves."""
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def example_of(subject: Subject, args: object, kwargs: object) -> Example:
    """Check and flatten example inputs; raises `InputMismatch` or `UnsupportedInput`, naming all."""
    args, kwargs = _checked(args, kwargs)
    _bind(subject, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    paths = paths_of(args, kwargs)
    offenders = [
        f"{path} is a {type(leaf).__name__}"
        for path, leaf in zip(paths, leaves, strict=True)
        if not _fits(leaf)
    ]
    if offenders:
        raise UnsupportedInput(
            "; ".join(offenders),
            why="an input is a tensor, a constant, or a container that pytree knows",
            remedy="register the class: torch.export.register_dataclass for dataclasses, "
            "torch.utils._pytree.register_pytree_node for others",
        )
    return Example(spec, tuple(leaves), paths, names_of(args, kwargs, subject.parameters))


def _checked(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(args, tuple):
        raise InputMismatch(
            f"expected `args` to be a tuple of positional inputs, got {type(args).__name__}",
            remedy="write (x,) for a single input",
        )
    args = tuple(args)
    if kwargs is None:
        return args, {}
    if not isinstance(kwargs, Mapping):
        raise InputMismatch(f"expected `kwargs` to be a dict of keyword inputs, got {type(kwargs).__name__}")
    return args, dict(kwargs)


def _bind(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if subject.parameters is None:
        return
    try:
        subject.parameters.bind(*args, **kwargs)
    except TypeError as error:
        raise InputMismatch(
            f"the inputs do not fit {subject.name}: {error}",
            why=f"it takes {_readable(subject.parameters)}",
            remedy="pass the inputs as you would call the model",
        ) from error


def _readable(parameters: inspect.Signature) -> str:
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters.parameters.values()
    ]
    return str(inspect.Signature(bare))


def _fits(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not is_wrapper_subclass(leaf)
    return is_constant(leaf)


def is_constant(leaf: object) -> bool:
    """Whether a leaf can be kept as it is: Python's own values, torch's descriptions, modules, functions."""
    return isinstance(leaf, _CONSTANTS) or callable(leaf)


def is_plain_constant(leaf: object) -> bool:
    """Whether a result can be kept as it is: not a module or a function, which may hold tensors."""
    return isinstance(leaf, _CONSTANTS) and not isinstance(leaf, nn.Module)
