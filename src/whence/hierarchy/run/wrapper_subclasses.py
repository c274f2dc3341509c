"""Tensors that are made of others, in a captured call: taken apart so that gradients come back."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from whence._torch.pytrees import tree_unflatten, whole_leaves
from whence._torch.subclasses.wrapper_subclasses import (
    flattened_differentiably,
    is_composed,
    plain_parts,
    plain_parts_of,
)
from whence.program import Whole
from whence.provenance import ModulePath


def differentiable_leaves(
    leaves: Sequence[Any], arguments: Any, names: Sequence[str | None], wholes: Sequence[Whole]
) -> list[Any]:
    """The leaves of a call: those that are parts of composed arguments lead gradients to these.

    `names` are the values that the leaves stand for; by them `wholes` say how a gradient is made.
    """
    known = {whole.parts[0]: whole for whole in wholes}
    found = list(leaves)
    for tensor in whole_leaves(arguments):
        if is_composed(tensor) and tensor.requires_grad:
            held = {id(part): number for number, (_, part) in enumerate(plain_parts(tensor))}
            places = [(at, held[id(leaf)]) for at, leaf in enumerate(leaves) if id(leaf) in held]
            whole = known.get(names[places[0][0]] or "") if places else None
            parts = differentiable_parts(tensor, whole)
            for at, number in places:
                found[at] = parts[number]
    return found


def differentiable_parts(tensor: Tensor, whole: Whole | None) -> list[Tensor]:
    """The plain parts of a composed tensor; their gradients arrive at it as the capture saw its own."""
    spec = None if whole is None else whole.gradient
    gradient = None if spec is None else partial(_gradient, spec)
    return [part for _, part in plain_parts_of(flattened_differentiably(tensor, gradient))]


def _gradient(spec: Any, parts: list[Any]) -> Any:
    return tree_unflatten(parts, spec)


def with_differentiable_parts(
    module: nn.Module, rows: Sequence[tuple[str, ModulePath]], held: Sequence[Any], wholes: Sequence[Whole]
) -> list[Any]:
    """What a module holds at `rows`; parts of composed tensors lead their gradients there."""
    values = dict(zip((name for name, _ in rows), held, strict=True))
    paths = dict(rows)
    for whole in wholes:
        first = whole.parts[0]
        if isinstance(values.get(first), Tensor):
            tensor = holder_of(module, paths[first])
            values |= dict(zip(whole.parts, differentiable_parts(tensor, whole), strict=True))
    return [values[name] for name, _ in rows]


def holder_of(module: nn.Module, path: ModulePath) -> Any:
    """The tensor that a module holds at a path, or the composed one that the path leads into."""
    held: Any = module
    for segment in path:
        if isinstance(held, Tensor):
            return held
        held = registered(held, segment)
    return held


def registered(holder: Any, name: str) -> Any:
    """What a module holds under a name; its registers come before the attributes of its class."""
    found = None if isinstance(holder, Tensor) else _registered_value(holder, name)
    return getattr(holder, name) if found is None else found


def _registered_value(module: nn.Module, name: str) -> Any:
    """What is in a module's registers; None where nothing is."""
    for register in (module._modules, module._parameters, module._buffers):
        found = register.get(name)
        if found is not None:
            return found
    return None


def attribute_of(module: nn.Module, path: Sequence[str]) -> Any:
    held: Any = module
    for segment in path:
        held = registered(held, segment)
    return held


def registered_at(module: nn.Module, path: ModulePath) -> Any:
    """The tensor or module that is kept at an attribute path, and None where nothing is.

    Nothing is asked of the module: a parametrized weight would be computed, which may change its state.
    """
    held: Any = module
    for segment in path:
        if held is None:
            return None
        held = getattr(held, segment, None) if isinstance(held, Tensor) else _registered_value(held, segment)
    return held


@contextmanager
def holding(module: nn.Module, tensors: Mapping[ModulePath, Tensor]) -> Iterator[None]:
    """Let a module hold these parameters and buffers inside the block."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, tensor in tensors.items():
            attributes = attribute_of(module, path.parent).__dict__
            register = attributes["_buffers" if path.name in attributes["_buffers"] else "_parameters"]
            before.append((register, path.name, register.get(path.name)))
            register[path.name] = tensor
        yield
    finally:
        for register, name, held in before:
            register[name] = held
