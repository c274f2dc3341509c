"""`dynamic_shapes`, in torch.export's vocabulary, becomes a wish for every dimension of every input."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from whence._torch.pytrees import children_of
from whence._torch.sizes.dims import (
    DimWish,
    Freedom,
    further_examples,
    is_collection,
    is_spelled_out,
    spelled_out,
    wish_of,
)
from whence.errors import Fault, InvalidShapes
from whence.program.arguments.convention import argument_parts
from whence.program.arguments.open_sizes import Dimension
from whence.program.signature import Part
from whence.tracing.target.subject import Subject

_DIMS = "a Dim, Dim.AUTO, Dim.DYNAMIC, Dim.STATIC, a number or None"


@dataclass(frozen=True)
class ExampleLeaf:
    """One leaf of the arguments: its position among all, its path and its value in the example."""

    position: int
    path: str
    value: Any

    def dimension(self, dim: int | None) -> Dimension:
        """One of its dimensions; None for a whole number."""
        return Dimension(self.position, dim, self.path)

    def size(self, dim: int | None) -> int:
        """The size of a dimension in the example."""
        return int(self.value if dim is None else self.value.shape[dim])


Layout = Any
"""Arguments by name, and containers inside them, with a `Leaf` in the place of every leaf."""


@dataclass(frozen=True)
class DynamicSizes:
    """What was asked of every dimension that may vary, and its size in the example.

    `layout` is how the arguments are arranged, and `further` are inputs for which the capture is to hold.
    """

    wishes: Mapping[Dimension, DimWish] = field(default_factory=dict)
    sizes: Mapping[Dimension, int] = field(default_factory=dict)
    layout: Layout = None
    further: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()


def dynamic_sizes(
    subject: Subject, paths: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], spec: Any
) -> DynamicSizes | None:
    """The wishes; None where nothing was asked. Raises `InvalidShapes`, naming all that does not fit."""
    if spec is None:
        return None
    if is_collection(spec):
        further = further_examples(spec)
        spec = _worked_out(subject, spec, args, kwargs)
    elif is_spelled_out(spec):
        further = []
    else:
        raise InvalidShapes(
            f"dynamic_shapes is a {type(spec).__name__}",
            remedy="pass a dict by argument, a tuple by position, a ShapesCollection or AdditionalInputs",
        )
    positions = {path: position for position, path in enumerate(paths)}
    layout = {
        name: _argument_layout(value, path, positions)
        for name, path, value in arguments_of(subject.parameters, args, kwargs)
    }
    found = list(_matched(layout, _specification_by_name(layout, spec)) if spec else ())
    faults = [row for row in found if isinstance(row, Fault)]
    wishes = dict(row for row in found if not isinstance(row, Fault))
    leaves = {leaf.position: leaf for leaf in _leaves_of_layout(layout)}
    faults += _value_faults(wishes, leaves)
    faults += _composed(wishes, argument_parts(args, dict(kwargs)))
    InvalidShapes.refuse(faults)
    free = {at: wish for at, wish in wishes.items() if wish.freedom is not Freedom.STATIC}
    return DynamicSizes(free, {at: leaves[at.position].size(at.dim) for at in free}, layout, further)


def _composed(wishes: Mapping[Dimension, DimWish], parts: Sequence[Part | None]) -> Iterator[Fault]:
    """Sizes of tensors that are made of others: those of the whole would have to follow."""
    for at, wish in wishes.items():
        part = parts[at.position]
        if part is not None and wish.freedom is not Freedom.STATIC:
            yield Fault(
                f"{at} is to vary, and is a size of a {part.type}",
                remedy="write None for tensors that are made of others, or pass what they are made of",
            )


def _worked_out(subject: Subject, spec: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    try:
        return spelled_out(spec, subject.call, args, kwargs)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidShapes(
            f"{type(spec).__name__} does not fit the inputs",
            why=str(error),
            remedy="give it the tensors that are passed to capture, and inputs of one structure",
        ) from error


def arguments_of(
    parameters: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """The arguments as torch.export names them: name, path (nested for `*args` and `**kwargs`) and value."""
    if parameters is None:
        yield from ((f"args_{at}", f"args[{at}]", value) for at, value in enumerate(args))
        yield from ((name, f"kwargs[{name!r}]", value) for name, value in kwargs.items())
        return
    bound = parameters.bind(*args, **kwargs).arguments
    taken = 0
    for name, value in bound.items():
        match parameters.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                yield name, [f"args[{taken + at}]" for at in range(len(value))], value
            case inspect.Parameter.VAR_KEYWORD:
                yield name, {key: f"kwargs[{key!r}]" for key in value}, value
            case inspect.Parameter.KEYWORD_ONLY:
                yield name, f"kwargs[{name!r}]", value
            case _:
                by_position = taken < len(args)
                yield name, f"args[{taken}]" if by_position else f"kwargs[{name!r}]", value
                taken += by_position


def _argument_layout(value: Any, path: Any, positions: Mapping[str, int]) -> Layout:
    if isinstance(path, dict):
        return {key: _argument_layout(value[key], at, positions) for key, at in path.items()}
    if isinstance(path, list):
        return [_argument_layout(item, at, positions) for item, at in zip(value, path, strict=True)]
    inside = children_of(value)
    if inside is None:
        return ExampleLeaf(positions[path], path, value)
    rows = [(key, _argument_layout(child, path + access, positions)) for key, access, child in inside]
    return dict(rows) if isinstance(value, dict) else [layout for _, layout in rows]


def _leaves_of_layout(layout: Layout) -> Iterator[ExampleLeaf]:
    if isinstance(layout, ExampleLeaf):
        yield layout
    else:
        for inside in layout.values() if isinstance(layout, dict) else layout:
            yield from _leaves_of_layout(inside)


def _specification_by_name(layout: Mapping[str, Layout], spec: Any) -> Any:
    """A specification by position under the names of the arguments."""
    if isinstance(spec, dict):
        return spec
    if len(spec) == len(layout):
        return dict(zip(layout, spec, strict=True))
    raise InvalidShapes(
        f"dynamic_shapes has {len(spec)} entries, and there are {len(layout)} arguments: {', '.join(layout)}",
        remedy="give one entry for each argument, None for those that stay as they are",
    )


Found = Iterator[Fault | tuple[Dimension, DimWish]]


def _matched(layout: Layout, spec: Any, at: str = "dynamic_shapes") -> Found:
    if isinstance(layout, ExampleLeaf):
        yield from _of_leaf(layout, spec, at)
    elif isinstance(layout, dict) and isinstance(spec, dict) and {*layout} == {*spec}:
        for key, inside in layout.items():
            yield from _matched(inside, spec[key], f"{at}[{key!r}]")
    elif isinstance(layout, list) and isinstance(spec, list | tuple) and len(layout) == len(spec):
        for number, (inside, own) in enumerate(zip(layout, spec, strict=True)):
            yield from _matched(inside, own, f"{at}[{number}]")
    elif spec is not None:
        yield _other_structure(layout, spec, at)


def _other_structure(layout: Layout, spec: Any, at: str) -> Fault:
    if isinstance(layout, dict) and isinstance(spec, dict):
        missing, unknown = [k for k in layout if k not in spec], [k for k in spec if k not in layout]
        words = [f"lacks {', '.join(map(repr, missing))}"] if missing else []
        words += [f"has {', '.join(map(repr, unknown))}, which is not there"] if unknown else []
        remedy = f"use exactly {', '.join(map(repr, layout))}, with None for what stays as it is"
        return Fault(f"{at} {' and '.join(words)}", remedy=remedy)
    wanted = f"a dict with {', '.join(map(repr, layout))}" if isinstance(layout, dict) else "a list or tuple"
    count = "" if isinstance(layout, dict) else f" of {len(layout)}"
    size = f" of {len(spec)}" if isinstance(spec, list | tuple | dict) else ""
    return Fault(
        f"{at} is a {type(spec).__name__}{size}, and must be {wanted}{count}",
        remedy="arrange dynamic_shapes as the arguments are; a registered class is a list of its parts",
    )


def _of_leaf(leaf: ExampleLeaf, spec: Any, at: str) -> Found:
    if spec is None:
        return
    if isinstance(leaf.value, Tensor):
        yield from _of_tensor(leaf, spec, at)
    elif type(leaf.value) is int:
        wish = wish_of(spec)
        if wish is None or wish.freedom is Freedom.NAMED:
            what = f"{at} is {_spec_in_words(spec)}, and {leaf.path} is a whole number"
            yield Fault(what, remedy="use Dim.AUTO or Dim.DYNAMIC for whole numbers; names are for sizes")
        else:
            yield leaf.dimension(None), wish
    else:
        what = f"{at} is {_spec_in_words(spec)}, and {leaf.path} is a {type(leaf.value).__name__}"
        as_tensor = f"; pass torch.tensor({leaf.value!r}) for one that varies"
        more = as_tensor if isinstance(leaf.value, bool | float | complex) else ""
        yield Fault(what, remedy=f"only tensors and whole numbers can vary: write None there{more}")


def _of_tensor(leaf: ExampleLeaf, spec: Any, at: str) -> Found:
    rank = leaf.value.dim()
    if isinstance(spec, tuple | list):
        if len(spec) != rank:
            what = f"{at} has {len(spec)} entries, and {leaf.path} has {rank} dimensions"
            yield Fault(
                what, remedy=f"give one entry for each dimension, or a dict from dimension to {_DIMS}"
            )
            return
        spec = dict(enumerate(spec))
    if not isinstance(spec, dict):
        what = f"{at} is {_spec_in_words(spec)}, and {leaf.path} is a tensor"
        yield Fault(what, remedy=f"give a tuple with one entry for each dimension, or a dict to {_DIMS}")
        return
    for dim, own in spec.items():
        wish = wish_of(own)
        if type(dim) is not int or not -rank <= dim < rank:
            yield Fault(
                f"{at}[{dim!r}] is no dimension of {leaf.path}, which has {rank}", remedy="count from 0"
            )
        elif wish is None:
            yield Fault(f"{at}[{dim}] is {_spec_in_words(own)}", remedy=f"use {_DIMS}")
        else:
            yield leaf.dimension(dim % rank), wish


def _spec_in_words(spec: Any) -> str:
    wish = wish_of(spec)
    return repr(spec) if wish is None else wish.text


def _value_faults(wishes: Mapping[Dimension, DimWish], leaves: Mapping[int, ExampleLeaf]) -> Iterator[Fault]:
    """Examples that do not keep to what was asked of all inputs."""
    first: dict[str, tuple[Dimension, DimWish, int]] = {}
    for at, wish in wishes.items():
        size = leaves[at.position].size(at.dim)
        base, left = divmod(size - wish.offset, wish.scale)
        if wish.value is not None and wish.value != size:
            yield Fault(f"{at} is {size}, and dynamic_shapes says that it is always {wish.value}")
        elif left:
            yield Fault(f"{at} is {size}, which is not of the form {wish.text}")
        elif not ((wish.low is None or wish.low <= base) and (wish.high is None or base <= wish.high)):
            yield Fault(f"{at} is {size}, outside of {wish.text}", remedy=_EXAMPLE)
        elif wish.freedom is Freedom.NAMED:
            yield from _conflicts(first.setdefault(wish.name, (at, wish, base)), (at, wish, base))


_EXAMPLE = "use an example inside the range, or widen the range"


def _conflicts(
    first: tuple[Dimension, DimWish, int], other: tuple[Dimension, DimWish, int]
) -> Iterator[Fault]:
    (at, wish, base), (there, own, value) = first, other
    if (wish.low, wish.high) != (own.low, own.high):
        yield Fault(
            f"{wish.name} is {wish.text} for {at} and {own.text} for {there}",
            remedy="define a Dim once, and use it in both places",
        )
    elif base != value:
        yield Fault(
            f"{at} and {there} are both made of {wish.name}, which is {base} in one and {value} in the other",
            remedy="use an example where they agree, or a Dim of its own for each",
        )
