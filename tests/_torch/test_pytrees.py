"""Canaries: the registry of containers, and paths into them."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils._pytree import SUPPORTED_NODES, _get_node_type

from whence._torch.pytrees import (
    TreeSpec,
    container_spec,
    containers,
    is_container,
    key_segments,
    leaf_spec,
    spelled,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
    with_parts_replaced,
)

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Pair:
    left: Any
    right: Any


torch.export.register_dataclass(Pair, serialized_type_name="whence.tests.trees.Pair")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([1], "[0]"),
        ((1,), "[0]"),
        ({"key": 1}, "['key']"),
        ({3: 1}, "[3]"),
        (OrderedDict(key=1), "['key']"),
        (Point([1], ()), ".x[0]"),
        (Pair(None, [1]), ".right[0]"),
        ({"a": [{"b": 1}]}, "['a'][0]['b']"),
    ],
    ids=str,
)
def test_path_is_spelled_as_python_reads_it(value: Any, path: str) -> None:
    """The path to a leaf is the expression that a person would write."""
    pairs, _ = tree_flatten_with_path(value)
    found = {spelled(keys) for keys, leaf in pairs if leaf == 1}
    assert found == {path}
    assert eval(f"value{path}", {"value": value}) == 1


class Keyless:
    """A container that its author registered without keys, as diffusers does."""

    def __init__(self, first: Any, again: Any, other: Any = None) -> None:
        self.first, self.again, self.other = first, again, other


class KeylessDict(OrderedDict[str, Any]):
    """One that is a dict."""


_pytree.register_pytree_node(
    Keyless, lambda held: ([held.first, held.again, held.other], None), lambda held, _: Keyless(*held)
)
_pytree.register_pytree_node(
    KeylessDict,
    lambda held: (list(held.values()), list(held)),
    lambda held, names: KeylessDict(zip(names, held, strict=True)),
)


@pytest.mark.canary("torch.utils._pytree._get_node_type")
def test_container_without_keys() -> None:
    """A child is known by the attribute or the key that holds it, or by its number where two hold it."""
    value = Keyless(twice := object(), twice, KeylessDict(hidden=(last := object(),)))
    pairs, spec = tree_flatten_with_path([value])
    assert [spelled(path) for path, _ in pairs] == ["[0][0]", "[0][1]", "[0].other['hidden'][0]"]
    assert [leaf for _, leaf in pairs] == [twice, twice, last]
    for path, leaf in pairs:
        found: Any = [value]
        for key in path:
            found = key.get(found)
        assert found is leaf
    assert spec == _pytree.tree_structure([value])
    assert _get_node_type(Point(1, ())) in SUPPORTED_NODES


@pytest.mark.canary(
    "torch.utils._pytree.GetAttrKey", "torch.utils._pytree.MappingKey", "torch.utils._pytree.SequenceKey"
)
def test_segments_are_bare_keys() -> None:
    """For names the keys come without their spelling."""
    ((keys, _),), _ = tree_flatten_with_path({"a": [Point(1, ())]})
    assert key_segments(keys) == ["a", "0", "x"]


@pytest.mark.canary("torch.utils._pytree.tree_flatten")
@pytest.mark.parametrize(
    "value", [[1, (2,)], {"a": 1, "b": [2]}, Point(1, 2), Pair(1, [2]), None, (), 3], ids=str
)
def test_containers_round_trip(value: Any) -> None:
    """Flat leaves and a structure make the same value again."""
    assert tree_unflatten(*tree_flatten(value)) == value


def test_registry_is_the_one_everybody_registers_in() -> None:
    """A class registered with torch.export or `torch.utils._pytree` is known here."""

    class Own:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

    _pytree.register_pytree_node(Own, lambda own: ([own.inner], None), lambda leaves, _: Own(*leaves))
    assert tree_flatten(Own([1, 2]))[0] == [1, 2]
    assert tree_flatten(Pair(1, 2))[0] == [1, 2]


def test_none_is_a_leaf() -> None:
    """None stays in its place among the leaves."""
    assert tree_flatten([None, 1])[0] == [None, 1]


def test_unknown_object_is_a_leaf() -> None:
    """An object of a class that nobody registered is a leaf."""
    unknown = object()
    assert tree_flatten([unknown])[0] == [unknown]


@pytest.mark.canary("torch.utils._pytree.tree_map")
def test_parts_are_replaced_by_identity() -> None:
    """`tree_map` stops where it is told to: a container may be replaced as a whole."""
    inner = [1, 2]
    assert with_parts_replaced({"a": inner, "b": 3}, {id(inner): "other"}) == {"a": "other", "b": 3}


@pytest.mark.canary("torch.utils._pytree.tree_map_only")
def test_map_over_one_type() -> None:
    """`tree_map_only` changes leaves of a type and leaves the others."""
    assert tree_map_only(int, lambda number: number + 1, [1, "a", {"b": 2}]) == [2, "a", {"b": 3}]


def test_equal_structures_are_equal() -> None:
    """Structures compare by kind, keys and order."""
    assert tree_flatten({"a": 1})[1] == tree_flatten({"a": 2})[1]
    assert tree_flatten({"a": 1})[1] != tree_flatten(OrderedDict(a=1))[1]
    assert tree_flatten([1])[1] != tree_flatten((1,))[1]


@pytest.mark.canary("torch.utils._pytree.KeyPath")
@pytest.mark.parametrize("name", ["SequenceKey", "MappingKey", "GetAttrKey", "KeyPath", "TreeSpec"])
def test_private_names_are_there(name: str) -> None:
    """The names that we import from `torch.utils._pytree` exist."""
    assert hasattr(_pytree, name)


@pytest.mark.canary("torch.utils._pytree.SUPPORTED_NODES")
def test_the_registry_is_a_dictionary_by_class() -> None:
    """`SUPPORTED_NODES` holds the classes that are containers."""
    assert list in SUPPORTED_NODES
    assert is_container(dict)
    assert not is_container(int)


def test_sizes_come_back_as_sizes() -> None:
    """PyTorch's registry makes a tuple of a `torch.Size`; other containers around it are as they were."""
    value = (1, torch.Size([2, 3]), {"key": [torch.Size([]), Point(torch.Size([4]), (5,))]}, Pair(6, None))
    leaves, spec = tree_flatten(value)
    assert type(_pytree.tree_unflatten(leaves, spec)[1]) is tuple
    again = tree_unflatten(leaves, spec)
    assert again == value
    kinds = [type(part) for part in (again[1], again[2]["key"][0], again[2]["key"][1].x)]
    assert kinds == [torch.Size] * 3
    assert type(again[2]["key"][1].y) is tuple
    assert type(tree_unflatten([1, "word", 3, 4, 5, 6, None], spec)[1]) is tuple


@pytest.mark.canary("torch.utils._pytree.TreeSpec")
def test_structures_are_made_of_their_parts() -> None:
    """A `TreeSpec` of class, context and children is that of flattening; classes are found by name."""
    value = {"a": [1, (2, None)], "b": Point(3, 4)}
    _, wanted = tree_flatten(value)
    kinds = containers()

    def again(spec: TreeSpec) -> TreeSpec:
        if spec.is_leaf():
            return leaf_spec()
        name = f"{spec.type.__module__}:{spec.type.__qualname__}"
        return container_spec(kinds[name], spec.context, list(map(again, spec.children())))

    assert again(wanted) == wanted
    assert tree_unflatten([1, 2, None, 3, 4], again(wanted)) == value
