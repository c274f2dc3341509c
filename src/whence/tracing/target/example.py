"""Example inputs become flat leaves with names and paths."""

import enum
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.elsewhere.target import Elsewhere
from whence._torch.plain_values import PLAIN_IN_WHOLE
from whence._torch.pytrees import TreeSpec, tree_flatten, tree_unflatten, whole_leaves
from whence._torch.sizes.dims import Freedom
from whence._torch.subclasses.wrapper_subclasses import is_composed, kind_of, untraceable
from whence.errors import Fault, InputMismatch, InvalidShapes, UnsupportedInput
from whence.program.arguments.binding import binding_faults
from whence.program.arguments.convention import argument_parts, names_of, paths_of, whole_paths_of
from whence.program.arguments.open_sizes import Dimension, Sizes
from whence.program.calls import Deferred
from whence.program.signature import Part
from whence.provenance import Source
from whence.tracing.target.caches import open_caches
from whence.tracing.target.dynamic_shapes import DynamicSizes, dynamic_sizes
from whence.tracing.target.subject import Subject

_CONSTANTS = (*PLAIN_IN_WHOLE, enum.Enum, torch.Generator, nn.Module, Deferred)


Numbers = tuple[Sizes, Mapping[str, int]]
"""Numbers for some of the sizes that an earlier capture left open."""


@dataclass(frozen=True)
class Given:
    """What a capture is given beside the model: example inputs, and which of their sizes may vary.

    `preserve` are patterns of the modules whose calling convention the program keeps. `numbers` are sizes, of
    those that earlier captures left open, that are to be numbers, one capture after another. `told` are lines
    of code that are told that they are being compiled. With `decide="example"` its values decide where the
    model lets values decide. `device` names the one that the program is for, where it is not that of the
    tensors; these are `elsewhere` then.
    """

    args: Any
    kwargs: Any = None
    dynamic_shapes: Any = None
    preserve: Sequence[str] = ()
    numbers: tuple[Numbers, ...] = ()
    told: Sequence[Source] = ()
    decide: str | None = None
    device: str | None = None
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True)
class Example:
    """The inputs a capture runs on: their structure, and for every leaf its value, path and name.

    `dynamic` says which sizes may vary; None where nobody asked, and all are numbers. `wholes` are the
    tensors that are made of others, and `parts` says for every leaf whether it is one of theirs.
    `preserve` are patterns of the modules whose calling convention the program keeps. An example that
    `decides` is asked for values where the model decides by some. `elsewhere` is the device that the program
    is for.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    names: tuple[str, ...]
    dynamic: DynamicSizes | None = None
    wholes: tuple[Tensor, ...] = ()
    parts: tuple[Part | None, ...] = ()
    preserve: Sequence[str] = ()
    decides: bool = False
    elsewhere: Elsewhere | None = None

    def with_leaves(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` of the same structure over other leaves."""
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def example_of(subject: Subject, given: Given) -> Example:
    """Check and flatten example inputs; raises `InputMismatch` or `UnsupportedInput`, naming all."""
    args, kwargs = _checked_arguments(given.args, given.kwargs)
    _bind(subject, args, kwargs)
    if open_caches(held := whole_leaves((args, kwargs))):
        held = whole_leaves((args, kwargs))
    UnsupportedInput.refuse(
        f for pair in zip(whole_paths_of(args, kwargs), held, strict=True) for f in _leaf_faults(*pair)
    )
    leaves, spec = tree_flatten((args, kwargs))
    paths = paths_of(args, kwargs)
    dynamic = dynamic_sizes(subject, paths, args, kwargs, given.dynamic_shapes)
    wholes = tuple(leaf for leaf in held if is_composed(leaf))
    named = Example(
        spec,
        tuple(leaves),
        paths,
        names_of(args, kwargs, subject.parameters),
        None if dynamic is None else _named_once(dynamic, leaves),
        wholes,
        argument_parts(args, kwargs),
        given.preserve,
        given.decide is not None,
        given.elsewhere,
    )
    return reduce(_with_numbers, given.numbers, named)


def _with_numbers(example: Example, numbers: Numbers) -> Example:
    """The example with these sizes, and nothing asked of the dimensions that have them."""
    sizes, given = numbers
    if example.dynamic is None:
        return example
    shapes = sizes.shapes_at(given, example.leaves)
    resized: dict[int, Tensor] = {}
    for leaf, shape in zip(example.leaves, shapes, strict=True):
        if shape is not None and id(leaf) not in resized:
            resized[id(leaf)] = leaf.new_empty(shape).requires_grad_(leaf.requires_grad)
    leaves = tuple(resized.get(id(leaf), leaf) for leaf in example.leaves)

    def is_as_before(at: Dimension) -> bool:
        return at.of(example.leaves) == at.of(leaves)

    wishes = {at: wish for at, wish in example.dynamic.wishes.items() if is_as_before(at)}
    return replace(example, leaves=leaves, dynamic=replace(example.dynamic, wishes=wishes, further=()))


def _named_once(dynamic: DynamicSizes, leaves: Sequence[Any]) -> DynamicSizes:
    """Of one tensor in several places a size is asked for in the first; another wish contradicts that."""
    first: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            first.setdefault(id(leaf), position)
    again = {at: first.get(id(leaves[at.position]), at.position) for at in dynamic.wishes}
    again = {at: there for at, there in again.items() if there != at.position}
    said = {(at.position, at.dim, wish.name) for at, wish in dynamic.wishes.items()}
    InvalidShapes.refuse(
        Fault(
            f"{dynamic.wishes[at].text} is asked of {at}, and something else of the same tensor elsewhere",
            why="one tensor is in several places of the example, and has one size",
            remedy="ask the same of all of them, or capture with tensors of their own",
        )
        for at, there in again.items()
        if (there, at.dim, (wish := dynamic.wishes[at]).name) not in said and wish.freedom is not Freedom.AUTO
    )
    return replace(dynamic, wishes={at: wish for at, wish in dynamic.wishes.items() if at not in again})


def _checked_arguments(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = {} if kwargs is None else kwargs
    if isinstance(args, tuple) and isinstance(kwargs, Mapping):
        return args, dict(kwargs)
    tuples = ("args", args, tuple, "a tuple of positional inputs", "write (x,) for a single input")
    mappings = ("kwargs", kwargs, Mapping, "a dict of keyword inputs", "write {'name': x}, or nothing")
    raise InputMismatch.of(
        Fault(f"expected `{name}` to be {what}, got {type(given).__name__}", remedy=remedy)
        for name, given, kind, what, remedy in (tuples, mappings)
        if not isinstance(given, kind)
    )


def _bind(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters = subject.parameters
    if parameters is not None and (faults := binding_faults(parameters, args, kwargs)):
        bare = [row.replace(annotation=inspect.Parameter.empty) for row in parameters.parameters.values()]
        raise InputMismatch(
            f"the inputs do not fit {subject.name}: {'; '.join(faults)}",
            why=f"it takes {inspect.Signature(bare)}",
            remedy="pass the inputs as you would call the model",
        )


REGISTER = (
    "register the class: torch.export.register_dataclass for dataclasses, "
    "torch.utils._pytree.register_pytree_node for others"
)
"""What lets PyTorch look into objects of a class."""


def _leaf_faults(path: str, leaf: Any) -> Iterator[Fault]:
    if isinstance(leaf, Tensor) and (found := untraceable(leaf)):
        yield Fault(f"{path} is a {kind_of(leaf)}", why=found[0], remedy=found[1])
    elif not isinstance(leaf, Tensor) and not is_constant(leaf):
        yield Fault(
            f"{path} is a {type(leaf).__name__}",
            why="an input is a tensor, a constant, or a container that pytree knows",
            remedy=REGISTER,
        )


def is_constant(leaf: object) -> bool:
    """Whether a leaf can be kept as it is: Python's own values, torch's descriptions, modules, functions."""
    return isinstance(leaf, _CONSTANTS) or callable(leaf)


def is_plain_constant(leaf: object) -> bool:
    """Whether a result can be kept as it is: not a module or a function, which may hold tensors."""
    return isinstance(leaf, _CONSTANTS) and not isinstance(leaf, nn.Module)
