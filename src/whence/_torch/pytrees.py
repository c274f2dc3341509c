"""Pytrees: containers of inputs and outputs as flat leaves and a structure.

`torch.utils._pytree` is private, and it is the registry that torch.export, FSDP and transformers register
their containers in; `optree` or `torch.utils.pytree` would not see those registrations.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    KeyPath,
    MappingKey,
    SequenceKey,
    TreeSpec,
    _get_node_type,
    register_pytree_node,
    tree_map_only,
)

from whence._torch.subclasses.wrapper_subclasses import flattened_tensor, is_composed, plain_parts
from whence.errors import UnreadableFile

__all__ = [
    "GetAttrKey",
    "KeyPath",
    "MappingKey",
    "SequenceKey",
    "TreeSpec",
    "children_of",
    "composition_of",
    "key_segments",
    "spelled",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map_only",
    "tree_unflatten",
    "whole_flatten",
    "whole_leaves",
    "whole_paths",
    "with_parts_replaced",
    "with_tensors_flattened",
    "with_whole_leaves",
]


def tree_flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a value and its structure; a tensor that is made of others is a container of them."""
    leaves, spec = whole_flatten(value)
    if not any(map(is_composed, leaves)):
        return leaves, spec
    return _pytree.tree_flatten(tree_unflatten([*map(flattened_tensor, leaves)], spec))


def tree_unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """The value with these leaves; a `torch.Size` comes back as one, which PyTorch makes a tuple of.

    A named tuple is made of its fields, whatever its class does with them: a `PackedSequence` looks at them.
    Raises `UnreadableFile` for containers that this process cannot make (`Unmade`).
    """
    return _built(iter(leaves), spec) if _is_own(spec) else _pytree.tree_unflatten(leaves, spec)


def _is_own(spec: TreeSpec) -> bool:
    is_own = spec.type is torch.Size or _is_written(spec) or unmade_class(spec) is not None
    return is_own or any(map(_is_own, spec.children()))


def _is_written(spec: TreeSpec) -> bool:
    """Whether it is of a named tuple whose class somebody has written, above the one that Python makes."""
    return spec.type is namedtuple and spec.context.__bases__ != (tuple,)


def _built(leaves: Iterator[Any], spec: TreeSpec) -> Any:
    if spec.is_leaf():
        return next(leaves)
    if unmade_class(spec) is not None:
        refuse_unmade(spec)
    children = [_built(leaves, child) for child in spec.children()]
    if spec.type is torch.Size and all(isinstance(child, int | torch.SymInt) for child in children):
        return torch.Size(children)
    if _is_written(spec):
        return tuple.__new__(spec.context, children)
    return SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def tree_flatten_with_path(value: Any) -> tuple[list[tuple[KeyPath, Any]], TreeSpec]:
    """As `tree_flatten`, each leaf with its access."""
    leaves, spec = tree_flatten(value)
    paths = [path for path, _ in _paths(with_tensors_flattened(value))]
    return list(zip(paths, leaves, strict=True)), spec


def whole_paths(value: Any) -> list[KeyPath]:
    """The accesses of its `whole_leaves`."""
    return [path for path, _ in _paths(value)]


def _paths(value: Any, above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every leaf with its access; torch's own walk refuses containers that were registered without keys."""
    children = _keyed_children(value)
    if children is None:
        yield above, value
        return
    for key, child in children:
        yield from _paths(child, (*above, key))


def _keyed_children(value: Any) -> list[tuple[Any, Any]] | None:
    """What a container holds, each with its key; None for a leaf."""
    if (kind := _get_node_type(value)) not in SUPPORTED_NODES:
        return None
    node = SUPPORTED_NODES[kind]
    if node.flatten_with_keys_fn is not None:
        return node.flatten_with_keys_fn(value)[0]
    children, _ = node.flatten_fn(value)
    return [(_key_of(value, number, child), child) for number, child in enumerate(children)]


def _key_of(value: Any, number: int, child: Any) -> Any:
    """How a child is reached in a container that does not say: by the one key or attribute that holds it."""
    held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    names = [name for name, inside in held.items() if inside is child]
    if len(names) != 1:
        return Nth(number)
    return MappingKey(names[0]) if isinstance(value, Mapping) else GetAttrKey(names[0])


@dataclass(frozen=True)
class Nth:
    """A child of a container that has no other name for it."""

    number: int

    def __str__(self) -> str:
        return f"[{self.number}]"

    def get(self, value: Any) -> Any:
        """What is there."""
        return SUPPORTED_NODES[type(value)].flatten_fn(value)[0][self.number]


def with_tensors_flattened(value: Any) -> Any:
    """A value in which tensors that are made of others are containers of them."""
    leaves, spec = _pytree.tree_flatten(value)
    if not any(map(is_composed, leaves)):
        return value
    return tree_unflatten([flattened_tensor(leaf) if is_composed(leaf) else leaf for leaf in leaves], spec)


def composition_of(value: Any) -> list[tuple[str, Any, str] | None]:
    """For every leaf that is part of a tensor: where that is, itself, and the access; None for others."""
    found: list[tuple[str, Any, str] | None] = []
    for path, leaf in _paths(value):
        rows = plain_parts(leaf) if is_composed(leaf) else [((), leaf)]
        found += [(spelled(path), leaf, ".".join(access)) if access else None for access, _ in rows]
    return found


def whole_flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a value, tensors that are made of others as they are, and its structure."""
    return _pytree.tree_flatten(value)


def whole_leaves(value: Any) -> list[Any]:
    """The leaves of a value, tensors that are made of others as they are."""
    return whole_flatten(value)[0]


def with_whole_leaves(value: Any, leaves: list[Any]) -> Any:
    """The value over other `whole_leaves`."""
    return tree_unflatten(leaves, _pytree.tree_flatten(value)[1])


def with_parts_replaced(value: Any, others: Mapping[int, Any]) -> Any:
    """The value with others in the place of parts, by their identities."""
    return _pytree.tree_map(
        lambda part: others.get(id(part), part), value, is_leaf=lambda part: id(part) in others
    )


def spelled(path: KeyPath) -> str:
    """How a person writes the access: `[0]['mask'].hidden`."""
    return "".join(_access(key) for key in path)


def key_segments(path: KeyPath) -> list[str]:
    """The bare keys of an access: `["0", "mask", "hidden"]`."""
    return [str(_bare(key)) for key in path]


def is_container(kind: object) -> bool:
    """Whether it is a class that is registered."""
    return isinstance(kind, type) and kind in SUPPORTED_NODES


def register_container(
    kind: type,
    flatten: Callable[[Any], tuple[list[tuple[Any, Any]], Any]],
    restore: Callable[[Any, Any], Any],
) -> None:
    """Register a class: `flatten` gives accesses with values, and a context, from which `restore` makes it.

    One access may be several keys deep.
    """
    register_pytree_node(
        kind,
        lambda value: ([child for _, child in flatten(value)[0]], flatten(value)[1]),
        restore,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=lambda value: (
            [(Keys(path), child) for path, child in flatten(value)[0]],
            flatten(value)[1],
        ),
    )


@dataclass(frozen=True)
class Keys:
    """Several keys as one."""

    keys: tuple[Any, ...]

    def __str__(self) -> str:
        return spelled(self.keys)

    def get(self, value: Any) -> Any:
        """What is there."""
        for key in self.keys:
            value = key.get(value)
        return value


def children_of(value: Any) -> list[tuple[Any, str, Any]] | None:
    """What a container holds: the bare key, the access and the value of each; None for a leaf."""
    children = _keyed_children(flattened_tensor(value))
    return None if children is None else [(_bare(key), _access(key), child) for key, child in children]


def _access(key: Any) -> str:
    match key:
        case SequenceKey(idx=index) | Nth(number=index):
            return f"[{index}]"
        case GetAttrKey(name=name):
            return f".{name}"
        case Keys(keys=keys):
            return spelled(keys)
        case _:
            return f"[{_bare(key)!r}]"


def _bare(key: Any) -> Any:
    match key:
        case SequenceKey(idx=index) | Nth(number=index):
            return index
        case MappingKey(key=name):
            return name
        case GetAttrKey(name=name):
            return name
        case Keys(keys=keys):
            return "_".join(map(str, map(_bare, keys)))
        case _:
            return str(key).strip("[]<>.'\"")


class Unmade:
    """Base of classes that stand for containers of which a file has only the name: `why` nobody can make one,
    and what would help."""

    what = why = remedy = ""

    @classmethod
    def named(cls, name: str, why: str, remedy: str) -> type["Unmade"]:
        """The class that stands for one of that name, `module:path`."""
        module, _, path = name.partition(":")
        told = {"what": f"nobody can make the container {module}.{path}", "why": why, "remedy": remedy}
        return type(path.rpartition(".")[2], (cls,), {"__module__": module, "__qualname__": path, **told})


def unmade_class(spec: TreeSpec) -> type[Unmade] | None:
    """What stands for the container itself, or for the class of a named tuple."""
    kind = spec.context if spec.type is namedtuple else spec.type
    return kind if isinstance(kind, type) and issubclass(kind, Unmade) else None


def unmade_in(spec: TreeSpec) -> Iterator[type[Unmade]]:
    """What stands for containers anywhere in a structure."""
    if (kind := unmade_class(spec)) is not None:
        yield kind
    for child in spec.children():
        yield from unmade_in(child)


def refuse_unmade(spec: TreeSpec) -> None:
    """Raise `UnreadableFile` for the first container that nobody can make."""
    if (kind := next(unmade_in(spec), None)) is not None:
        raise UnreadableFile(kind.what, why=kind.why, remedy=kind.remedy)


def leaf_spec() -> TreeSpec:
    """The structure of a leaf."""
    return _pytree.tree_flatten(0)[1]


def container_spec(kind: Any, context: Any, children: list[TreeSpec]) -> TreeSpec:
    """The structure of a container of this class, or of a `collections.namedtuple` that `context` gives."""
    return TreeSpec(kind, context, children)


def containers() -> dict[str, Any]:
    """The classes that are registered, by module and qualified name."""
    return {f"{kind.__module__}:{kind.__qualname__}": kind for kind in SUPPORTED_NODES}
