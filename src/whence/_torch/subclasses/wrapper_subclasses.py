"""Tensors that are made of other tensors: DTensors, quantised weights and other wrapper subclasses.

PyTorch's protocol for them is `__tensor_flatten__` and `__tensor_unflatten__`. To pytrees they are leaves;
here they become containers of their plain tensors, so that a program sees only those.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import GetAttrKey, register_pytree_node

from whence._torch.subclasses.fully_sharded import is_distributed
from whence._torch.tensors import same_bits
from whence.errors import NotDifferentiable

_NOT_COMPOSED = frozenset({Tensor, nn.Parameter, nn.Buffer, FakeTensor, int, float, bool, str, type(None)})
_OWN_WAYS = ("__torch_function__", "__torch_dispatch__")


def is_composed(value: object) -> bool:
    """Whether a value is a tensor that is made of other tensors."""
    if type(value) in _NOT_COMPOSED or not isinstance(value, Tensor):
        return False
    return is_traceable_wrapper_subclass(value)


@dataclass(frozen=True, eq=False)
class Composition:
    """How a tensor of `kind` is made of tensors: the attributes that hold them, and the rest.

    `context` is what the class needs beside them, and `rest` are attributes that hold something else, such as
    the mesh of a DTensor. `shape` and `strides` are those of the whole; of those that are symbols, `follows`
    says which part has the same: its number, whether as a size, and the dimension.
    """

    kind: type
    names: tuple[str, ...]
    context: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    rest: tuple[tuple[str, Any], ...] = ()
    follows: tuple[tuple[int, bool, int] | None, ...] = ()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Composition)
            and (self.kind, self.names) == (other.kind, other.names)
            and _same_sizes(self.shape, other.shape)
            and _same_sizes(self.strides, other.strides)
            and _same_context((self.context, self.rest), (other.context, other.rest))
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.names))

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(self.names)})"


def _same_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether sizes agree, as far as both are known."""
    if len(left) != len(right):
        return False
    pairs = zip(left, right, strict=True)
    return all(one == other for one, other in pairs if type(one) is int and type(other) is int)


def _same_context(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, SymInt) or isinstance(right, SymInt):
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(_same_context, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same_context(left[key], right[key]) for key in left)
    if isinstance(left, Tensor):
        return same_bits(left, right)
    return bool(left == right)


@dataclass(frozen=True)
class TensorParts:
    """A tensor taken apart, as a container that pytree knows."""

    layout: Composition
    parts: tuple[Any, ...]

    def __repr__(self) -> str:
        rows = zip(self.layout.names, self.parts, strict=True)
        return f"{self.layout.kind.__name__}({', '.join(f'{name}={part!r}' for name, part in rows)})"


def layout_of(tensor: Any) -> Composition:
    """The layout of a tensor that is made of others; theirs are not looked at.

    What a DTensor says last of itself is whether it requires a gradient, which is no part of how it is made.
    """
    names, context = tensor.__tensor_flatten__()
    held = [(name, getattr(tensor, name)) for name in names]
    tensors = [value for _, value in held if isinstance(value, Tensor)]
    return Composition(
        kind=type(tensor),
        names=tuple(name for name, value in held if isinstance(value, Tensor)),
        context=(*context[:-1], False) if is_distributed(tensor) else context,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        rest=tuple((name, value) for name, value in held if not isinstance(value, Tensor)),
        follows=tuple(_followed_size(size, tensors) for size in (*tensor.shape, *tensor.stride())),
    )


def _followed_size(size: Any, parts: Sequence[Tensor]) -> tuple[int, bool, int] | None:
    """Where a size that is a symbol is found among those of the parts."""
    if not isinstance(size, SymInt):
        return None
    for number, part in enumerate(parts):
        for is_size, found in ((True, part.shape), (False, part.stride())):
            for dim, own in enumerate(found):
                if isinstance(own, SymInt) and own.node.expr == size.node.expr:
                    return number, is_size, dim
    return None


def has_static_sizes(layout: Composition) -> bool:
    """Whether the sizes of a composed tensor are numbers, or follow from those of its parts."""
    sizes = zip((*layout.shape, *layout.strides), layout.follows, strict=True)
    return all(not isinstance(size, SymInt) or place is not None for size, place in sizes)


def tensors_of(tensor: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a tensor is made of, with the attributes that hold them."""
    names, _ = tensor.__tensor_flatten__()
    held = [(name, getattr(tensor, name)) for name in names]
    return [(name, value) for name, value in held if isinstance(value, Tensor)]


def flattened_tensor(value: Any) -> Any:
    """A composed tensor as its parts, those of parts included; anything else as it is."""
    if not is_composed(value):
        return value
    layout = layout_of(value)
    return TensorParts(layout, tuple(flattened_tensor(getattr(value, name)) for name in layout.names))


def plain_parts(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The plain tensors of a tensor, each with the attributes that lead to it."""
    if is_composed(value):
        for name, part in tensors_of(value):
            yield from plain_parts(part, (*path, name))
    else:
        yield path, value


def put_together(parts: Sequence[Any], layout: Composition) -> Any:
    """The tensor of these parts, connected to them where they require gradients."""
    if not all(isinstance(part, Tensor) for part in parts):
        return TensorParts(layout, tuple(parts))
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return _Together.apply(layout, *parts)
    return _whole_of(layout, parts)


def _whole_of(layout: Composition, parts: Sequence[Any]) -> Any:
    make: Any = layout.kind
    held = dict(zip(layout.names, parts, strict=True)) | dict(layout.rest)
    sizes = [
        size if place is None else _size_at(place, parts)
        for size, place in zip((*layout.shape, *layout.strides), layout.follows, strict=True)
    ]
    rank = len(layout.shape)
    return make.__tensor_unflatten__(held, layout.context, torch.Size(sizes[:rank]), tuple(sizes[rank:]))


def _size_at(place: tuple[int, bool, int], parts: Sequence[Any]) -> Any:
    number, is_size, dim = place
    return parts[number].shape[dim] if is_size else parts[number].stride(dim)


def flattened_differentiably(tensor: Any, gradient: Callable[[list[Any]], Any] | None) -> Any:
    """As `flattened_tensor`, with parts whose gradients arrive at the whole as one.

    `gradient` makes it of those of the plain parts; without, it has the layout of the whole.
    """
    if not is_composed(tensor) or not (tensor.requires_grad and torch.is_grad_enabled()):
        return flattened_tensor(tensor)
    parts = iter(_Flatten.apply(tensor, gradient))
    return _filled_with_parts(flattened_tensor(tensor), parts)


def _filled_with_parts(value: Any, parts: Iterator[Tensor]) -> Any:
    if isinstance(value, TensorParts):
        return TensorParts(value.layout, tuple(_filled_with_parts(part, parts) for part in value.parts))
    return next(parts)


class _Flatten(torch.autograd.Function):
    """From a composed tensor to its plain parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, gradient: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradient, ctx.template = gradient, flattened_tensor(tensor.detach())
        parts = tuple(part.detach() for _, part in plain_parts(tensor))
        ctx.mark_non_differentiable(*(part for part in parts if not carries_gradients(part)))
        return parts

    @staticmethod
    def backward(ctx: Any, *received: Any) -> Any:
        if all(part is None for part in received):
            return None, None
        parts = [part for _, part in plain_parts_of(ctx.template)]
        filled = [
            torch.zeros_like(part) if gradient is None else gradient
            for gradient, part in zip(received, parts, strict=True)
        ]
        if ctx.gradient is not None:
            return ctx.gradient(filled), None
        return _joined(_filled_with_parts(ctx.template, iter(filled))), None


def plain_parts_of(value: Any) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The plain tensors of what was taken apart."""
    if not isinstance(value, TensorParts):
        yield (), value
        return
    for name, part in zip(value.layout.names, value.parts, strict=True):
        yield from (((name, *path), plain) for path, plain in plain_parts_of(part))


def _joined(value: Any) -> Any:
    return _whole_of(value.layout, [*map(_joined, value.parts)]) if isinstance(value, TensorParts) else value


def carries_gradients(tensor: Tensor) -> bool:
    """Whether numbers of its kind can be differentiated."""
    return tensor.is_floating_point() or tensor.is_complex()


class _Together(torch.autograd.Function):
    """From parts to the composed tensor."""

    @staticmethod
    def forward(ctx: Any, layout: Composition, *parts: Any) -> Any:
        ctx.layout = layout
        return _whole_of(layout, [part.detach() for part in parts])

    @staticmethod
    def backward(ctx: Any, received: Any) -> Any:
        if not is_composed(received) or layout_of(received) != ctx.layout:
            raise NotDifferentiable(
                f"the gradient of a {ctx.layout.kind.__name__} arrived as {_kind_in_words(received)}",
                why="the backward was captured for a gradient that is made as the tensor is",
                remedy="bring the gradient to the layout of the result, such as its placements",
            )
        return None, *(getattr(received, name) for name in ctx.layout.names)


def _kind_in_words(value: Any) -> str:
    return f"{type(value).__name__} made otherwise" if is_composed(value) else f"a {type(value).__name__}"


def untraceable(tensor: Tensor) -> tuple[str, str] | None:
    """Why a recording cannot see what operations do to a tensor, and what to do; None where it can."""
    if is_composed(tensor):
        return _odd_parts(tensor)
    kind = type(tensor)
    if kind in _NOT_COMPOSED or is_lazy(tensor):
        return _odd_layout(tensor)
    own = [name for name in _OWN_WAYS if getattr(kind, name) is not getattr(nn.Parameter, name)]
    if not own:
        return _odd_layout(tensor)
    return (
        f"operations on it go through its class ({' and '.join(own)}), which does not say of what tensors "
        "it is made (__tensor_flatten__)",
        "use a plain tensor (tensor.as_subclass(torch.Tensor)), or let the class have __tensor_flatten__ and "
        "__tensor_unflatten__",
    )


def kind_of(tensor: Tensor) -> str:
    """What people call a tensor: its class, or its layout."""
    layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    is_plain = type(tensor) in _NOT_COMPOSED and layout != "strided"
    return f"{layout} tensor" if is_plain else type(tensor).__name__


def is_sparse(tensor: Tensor) -> bool:
    """Whether it is a plain tensor whose indices are part of its numbers."""
    return type(tensor) in _NOT_COMPOSED and tensor.layout is not torch.strided and not tensor.is_nested


def _odd_layout(tensor: Tensor) -> tuple[str, str] | None:
    if tensor.is_nested:
        why = "a nested tensor of the strided layout keeps the shapes of its parts as numbers inside"
        return why, _PADDED
    if tensor.layout is not torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        why = f"its layout is {name}, whose indices are part of its numbers"
        return why, "use a dense tensor: tensor.to_dense()"
    return None


def mesh_of(tensor: Any) -> tuple[tuple[str, int], ...]:
    """The axes of the mesh of a DTensor, by name or number, and how many devices each has."""
    mesh = getattr(tensor, "device_mesh", None)
    return () if mesh is None else axes_of(mesh)


def axes_of(mesh: Any) -> tuple[tuple[str, int], ...]:
    """The axes of a mesh, by name or number, and how many devices each has."""
    names = mesh.mesh_dim_names or map(str, range(mesh.ndim))
    return tuple(zip(names, map(int, mesh.shape), strict=True))


def groups_of(mesh: Any) -> tuple[str, ...]:
    """The names of the process groups of its axes, by which a graph reaches them, if they are there."""
    try:
        return tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
    except RuntimeError:
        return ()


def place_on(mesh: Any) -> tuple[int, ...]:
    """Where on its axes this process is, by which a graph has the part that is its own."""
    return tuple(mesh.get_coordinate() or ())


def placements_of(tensor: Any) -> tuple[str, ...]:
    """How it is spread over each of them, in PyTorch's words: `Shard(dim=0)`, `Replicate()`."""
    return tuple(map(repr, tensor.placements)) if mesh_of(tensor) else ()


_PADDED = "use a padded tensor and a mask: torch.nested.to_padded_tensor(tensor, 0)"


def _odd_parts(tensor: Any) -> tuple[str, str] | None:
    if tensor.is_nested:
        why = "a jagged tensor has a length of its own for each row, which no size of the program stands for"
        return why, _PADDED
    parts = tensors_of(tensor)
    for name, part in parts:
        if getattr(tensor, name) is not part:
            why = f"its {name} is another tensor each time it is asked for, and is known by which it is"
            return why, f"let {type(tensor).__name__} keep it as an attribute"
    return next((found for _, part in parts if (found := untraceable(part))), None)


register_pytree_node(
    TensorParts,
    lambda value: (list(value.parts), value.layout),
    put_together,  # type: ignore[arg-type]
    serialized_type_name="whence.Apart",
    flatten_with_keys_fn=lambda value: (
        [(GetAttrKey(name), part) for name, part in zip(value.layout.names, value.parts, strict=True)],
        value.layout,
    ),
)
