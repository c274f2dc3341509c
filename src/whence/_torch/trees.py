"""Pytrees: containers of inputs and outputs as flat leaves and a structure.

`torch.utils._pytree` is private, and it is the registry that torch.export, FSDP and transformers register
their containers in; `optree` or `torch.utils.pytree` would not see those registrations.
"""

from typing import Any

from torch.utils._pytree import (
    GetAttrKey,
    KeyPath,
    MappingKey,
    SequenceKey,
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "KeyPath",
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
        case _:
            return str(key).strip("[]<>.'\"")
