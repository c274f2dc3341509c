"""Pytrees: containers of inputs and outputs as flat leaves and a structure.

`torch.utils._pytree` is private, and it is the registry that torch.export, FSDP and transformers register
their containers in; `optree` or `torch.utils.pytree` would not see those registrations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    KeyPath,
    MappingKey,
    SequenceKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "GetAttrKey",
    "KeyPath",
    "SequenceKey",
    "TreeSpec",
    "children_of",
    "key_segments",
    "spelled",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map_only",
    "tree_unflatten",
]


def spelled(path: KeyPath) -> str:
    """How a person writes the access: `[0]['mask'].hidden`."""
    return "".join(_access(key) for key in path)


def key_segments(path: KeyPath) -> list[str]:
    """The bare keys of an access: `["0", "mask", "hidden"]`."""
    return [str(_bare(key)) for key in path]


def is_container(kind: type) -> bool:
    """Whether a class is registered."""
    return kind in SUPPORTED_NODES


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
    pairs, _ = tree_flatten_with_path(value, is_leaf=lambda inside: inside is not value)
    if len(pairs) == 1 and not pairs[0][0]:
        return None
    return [(_bare(path[0]), _access(path[0]), child) for path, child in pairs]


def _access(key: Any) -> str:
    match key:
        case SequenceKey(idx=index):
            return f"[{index}]"
        case GetAttrKey(name=name):
            return f".{name}"
        case Keys(keys=keys):
            return spelled(keys)
        case _:
            return f"[{_bare(key)!r}]"


def _bare(key: Any) -> Any:
    match key:
        case SequenceKey(idx=index):
            return index
        case MappingKey(key=name):
            return name
        case GetAttrKey(name=name):
            return name
        case Keys(keys=keys):
            return "_".join(map(str, map(_bare, keys)))
        case _:
            return str(key).strip("[]<>.'\"")
