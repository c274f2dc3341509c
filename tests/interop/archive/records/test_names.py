"""Things outside a program, named in a file."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter, methodcaller
from types import UnionType
from typing import Any, Union

import pytest
import torch

from whence.interop.archive.records.names import Described, LoadedNames
from whence.program.arguments.optimizer_arguments import Outside

TABLE: dict[Any, str] = {
    "text": "a",
    Union: "b",
    Sequence: "c",
    UnionType: "d",
    list: "e",
    (1, 2): "f",
    torch.float64: "g",
}
LOADED = LoadedNames({})


def through_file(way: Callable[[Any], Any]) -> Outside:
    """A variable as a file says it."""
    described = Described({})
    root = LOADED.root(described.root(sys.modules[__name__].__dict__))
    return Outside("TABLE[...]", root, LOADED.way(described.way((methodcaller("get", "TABLE"), way))), None)


@pytest.mark.parametrize("key", ["text", Union, Sequence, UnionType, list, torch.float64])
def test_entries_are_found_by_keys_that_have_a_name(key: Any) -> None:
    """Texts, classes, what typing has instead of classes, and dtypes."""
    assert through_file(itemgetter(key)).now() == TABLE[key]


@pytest.mark.parametrize("way", [itemgetter((1, 2)), partial(len)])
def test_what_a_file_cannot_say_is_not_found(way: Callable[[Any], Any]) -> None:
    """Where it is looked for is not taken for it."""
    assert TABLE not in (found := [through_file(way).now()])
    assert sys.modules[__name__].__dict__ not in found
