"""Files that were changed: each is refused by name, or holds a program that is well formed. Nothing runs."""

from __future__ import annotations

import builtins
import os
import pickle
import random
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interop.archive.mutations import mutated, with_data
from tests.interop.archive.programs import KINDS, content
from whence.captured import loaded
from whence.errors import UnreadableFile
from whence.program import wellformed
from whence.program.names import NamedOnly

MANY = 100_000 // len(KINDS) + 1


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a file could run while it is read: commands, code that is text, pickles, modules to import."""
    found: list[str] = []
    for kind in KINDS:
        read(content(kind))  # which loads what reading files takes
    before = sys.modules.keys() | set()

    def noted(name: str) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: found.append(name)

    for holder, name in ((os, "system"), (builtins, "eval"), (builtins, "exec"), (pickle, "loads")):
        monkeypatch.setattr(holder, name, noted(name))
    yield found
    found += sys.modules.keys() - before


def read(changed: bytes) -> bool:
    """Read a file that was changed; False where it was refused by name."""
    try:
        program = loaded(changed, "a file")
    except UnreadableFile:
        return False
    missing = {row.name for row in program.signature.state} - program.state.keys()
    assert [fault.what for fault in wellformed.faults(program, without_state=bool(missing))] == []
    for page in (str, repr, lambda each: str(each.guards), lambda each: each.to_json()):
        page(program)
    return True


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_changed_files(kind: str, ran: list[str]) -> None:
    """Bytes, members, and what the plain data says."""
    _look_at(kind, 40, ran)


@pytest.mark.random
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_changed_files(kind: str, ran: list[str]) -> None:
    """The same with many more."""
    _look_at(kind, MANY, ran)


def _look_at(kind: str, count: int, ran: list[str]) -> None:
    for number in range(count):
        with warnings.catch_warnings(action="ignore"):
            changed = mutated(content(kind), random.Random(f"{kind}:{number}"))
            try:
                read(changed)
            except Exception as error:
                error.add_note(f"file {number} of {kind}")
                raise
    assert ran == []


CODE = "__import__('os').system('x')"
"""What no file may bring anybody to run."""


def _place(*keys: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        holder = data
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = CODE

    return change


@pytest.mark.parametrize(
    "keys",
    [
        ("graphs", 0, "names", 0),
        ("graphs", 0, "targets", 0),
        ("tables", "symbols", 0, 0),
        ("convention", "sizes", "rules", "columns", "condition", 0),
        ("convention", "sizes", "readings", "columns", "name", 0),
        ("convention", "sizes", "shapes", 0, 0),
    ],
)
def test_code_in_the_place_of_a_name(keys: tuple[Any, ...], ran: list[str]) -> None:
    """Names of nodes end up in code that fx writes, and conditions of sizes are evaluated."""
    with pytest.raises(UnreadableFile):
        loaded(with_data(content("sizes"), _place(*keys)), "a file")
    assert ran == []


def test_a_count_of_rows_takes_no_memory() -> None:
    """Nothing is made as long as a file says before a column of it is."""
    changed = with_data(content("sizes"), _many_rows)
    tracemalloc.start()
    with pytest.raises(UnreadableFile, match="is not as long as others"):
        loaded(changed, "a file")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000_000


def _many_rows(data: Any) -> None:
    tables = [data]
    while tables:
        held = tables.pop()
        if isinstance(held, dict) and held.keys() == {"count", "columns"} and held["columns"]:
            held["count"] = 10**9
            return
        tables += held.values() if isinstance(held, dict) else held if isinstance(held, list) else ()


def _everywhere(data: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        yield (*above, key)
        yield from _everywhere(value, (*above, key))


@pytest.mark.parametrize("number", [0, None])
def test_guards_that_say_nothing(number: int | None, ran: list[str]) -> None:
    """A number anywhere in the guards is refused, or what was read can be printed."""
    places: list[tuple[Any, ...]] = []
    with_data(content("forward"), lambda data: places.extend(_everywhere(data["guards"])))
    for keys in places[::7]:

        def change(data: Any, keys: tuple[Any, ...] = keys) -> None:
            holder = data["guards"]
            for key in keys[:-1]:
                holder = holder[key]
            holder[keys[-1]] = number

        read(with_data(content("forward"), change))
    assert ran == []


def test_functions_of_python_are_not_called(ran: list[str]) -> None:
    """A target is an operator, or one of a fixed table: no other function is found by its name."""

    def change(data: Any) -> None:
        data["tables"]["targets"] = [["function", "os.system"] for _ in data["tables"]["targets"]]

    with pytest.raises(UnreadableFile, match=r"os\.system"):
        loaded(with_data(content("forward"), change), "a file")
    assert ran == []


def test_the_program_is_the_root() -> None:
    """Paths may be swapped: what reads state looks for it from a call up to the root, and would never end."""

    def change(data: Any) -> None:
        paths = data["tables"]["paths"]
        (root,) = (number for number, path in enumerate(paths) if path == [])
        paths[root], paths[root - 1] = paths[root - 1], paths[root]

    with pytest.raises(UnreadableFile, match="no call of the program"):
        loaded(with_data(content("forward"), change), "a file")


def test_classes_stay_names() -> None:
    """A class that a file names is one of ours that is called so, also where this process has it."""
    found = loaded(content("forward"), "a file").guards
    owners = {row.owner for row in found if row.owner is not None}
    assert "Linear" in {owner.__name__ for owner in owners}
    assert all(owner.__mro__ == (owner, NamedOnly, object) for owner in owners)
