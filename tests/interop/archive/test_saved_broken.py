"""Files that were changed: each is refused by name, or holds a program that is well formed. Nothing runs."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import random
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.interop.archive.mutations import mutated, with_data
from tests.interop.archive.programs import KINDS, content
from whence._torch.tensor_questions import asked_of
from whence.captured import loaded
from whence.errors import UnreadableFile
from whence.interop.archive.records.checked import expanded
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
@pytest.mark.sweep
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


@pytest.mark.parametrize("name", ["zero_", "backward", "detach_", "share_memory_", "import os", "__reduce__"])
def test_methods_of_arguments_are_not_called(name: str) -> None:
    """Questions to arguments are those of a fixed table: no file has a method of a caller's tensor run."""

    def change(data: Any) -> None:
        data["convention"]["questions"]["columns"]["question"][0] = name

    with pytest.raises(UnreadableFile, match="an argument is asked what is no question"):
        loaded(with_data(content("sizes of data"), change), "a file")
    with pytest.raises(LookupError, match="is no question"):
        asked_of(torch.ones(2), name)


def test_classes_stay_names() -> None:
    """A class that a file names is one of ours that is called so, also where this process has it."""
    found = loaded(content("forward"), "a file").guards
    owners = {row.owner for row in found if row.owner is not None}
    assert "Linear" in {owner.__name__ for owner in owners}
    assert all(owner.__mro__ == (owner, NamedOnly, object) for owner in owners)


def _columns(data: Any, name: str) -> Any:
    """A column of the modules, as one value each."""
    columns = data["modules"]["columns"]
    columns[name] = expanded(columns[name], lambda held: held)
    return columns[name]


def _without_child(data: Any) -> None:
    _columns(data, "children")[0] = []


def _elsewhere(data: Any) -> None:
    held = _columns(data, "parameters")
    held[0], held[1] = held[1], held[0]


def _other_name(data: Any) -> None:
    held = _columns(data, "parameters")
    at = next(number for number, rows in enumerate(held) if rows)
    held[at] = [["other", held[at][0][1]], *held[at][1:]]


def _without_buffers(data: Any) -> None:
    del data["modules"]["columns"]["buffers"]


def _other_path(data: Any) -> None:
    data["signature"]["inputs"]["columns"]["path"][1] = "elsewhere"


def _more_keys(data: Any) -> None:
    (row,) = [row for row in data["tables"]["structures"] if row and row[1] and "rest" in row[1]]
    row[1].append("more")


def _one_for_many(data: Any) -> None:
    """What the node of the normalisation gives, which are three tensors, is said to be what it reads."""
    graph, targets = data["graphs"][0], data["tables"]["targets"]
    called = [number for number, said in enumerate(graph["targets"]) if type(said) is int]
    at = next(number for number in called if "batch_norm" in targets[graph["targets"][number]][-2])
    graph["values"][at] = graph["values"][0]


def _read_otherwise(data: Any) -> None:
    """The first layer reads the weight of the last."""
    graph = data["graphs"][0]
    first, last = (graph["names"].index(f"p_{layer}_weight") for layer in (0, 4))
    graph["reads"][graph["reads"].index(first)] = last


def _other_shape(data: Any) -> None:
    """What the first layer gives is as large as what the second is given."""
    graph = data["graphs"][0]
    at = graph["names"].index("linear")
    graph["values"][at] = graph["values"][0]


def _called_otherwise(data: Any) -> None:
    """What gives an item of a row runs branches."""
    graph, targets = data["graphs"][0], data["tables"]["targets"]
    item, branches = targets.index(["function", "operator.getitem"]), targets.index(["higher order", "cond"])
    graph["targets"][graph["targets"].index(item)] = branches


def _operands_swapped(data: Any) -> None:
    """A branch takes the weight where it took the input."""
    graph, targets = data["graphs"][0], data["tables"]["targets"]
    branches = targets.index(["higher order", "cond"])
    at = graph["targets"].index(branches)
    forms = data["tables"]["forms"]
    before = sum(json.dumps(forms[form]).count('"node"') for form in graph["forms"][:at])
    count = json.dumps(forms[graph["forms"][at]]).count('"node"')
    graph["reads"][before + count - 1], graph["reads"][before + 3] = (
        graph["reads"][before + 3],
        graph["reads"][before + count - 1],
    )


def _written_elsewhere(data: Any) -> None:
    """The count that a run changes is said to be a parameter."""
    (row,) = [row for row in data["graphs"][0]["records"] if row[3]]
    row[3][0][0] = data["graphs"][0]["names"].index("p_kept")


def _loss_renamed(data: Any) -> None:
    names = data["signature"]["outputs"]["columns"]["name"]
    names[names.index("loss")] = "other"


def _reading_renamed(data: Any) -> None:
    """A size is read under another name than arguments and conditions have it."""
    data["convention"]["sizes"]["readings"]["columns"]["name"][0] = "other"


def _size_renamed(data: Any) -> None:
    """A size is called otherwise where values have it than where arguments are read."""
    data["tables"]["symbols"][0][0] = "other"


def _condition_of_a_number(data: Any) -> None:
    data["convention"]["sizes"]["rules"]["columns"]["condition"][0] = 0


def _loss_in_the_backward(data: Any) -> None:
    graph = data["graphs"][0]
    graph["origins"][graph["names"].index("sum_1")] = graph["origins"][-2]


def _self_inside(data: Any) -> None:
    """What a branch takes first is called as fx calls the module in the code that it writes."""
    data["graphs"][1]["targets"][0] = "self"


def _named_torch(data: Any) -> None:
    """A value in a branch has a name that the code of fx has for PyTorch, as its argument and in it."""
    graph = data["graphs"][1]
    graph["names"][0] = graph["targets"][0] = "torch"


def _arguments_inside_renamed(data: Any) -> None:
    """What a branch takes second is called as its first is called in it."""
    graph = data["graphs"][1]
    graph["targets"][:2] = ["other", graph["names"][0]]


def _gradients_swapped(data: Any) -> None:
    """The gradient of a weight is said to be that of a bias, and the other way round."""
    of = data["signature"]["outputs"]["columns"]["of"]
    first, second = of.index("p_3_weight"), of.index("p_4_bias")
    of[first], of[second] = of[second], of[first]


def _gradient_of_nothing(data: Any) -> None:
    """A gradient is of no input."""
    of = data["signature"]["outputs"]["columns"]["of"]
    of[of.index("p_3_weight")] = None


def _no_backward(data: Any) -> None:
    """A joint program is said to be a forward alone."""
    del data["circumstances"]["has_backward"]


def _kinds_swapped(data: Any) -> None:
    """A constant is said to be a parameter."""
    kinds = _kinds(data, "inputs")
    kinds[kinds.index("constant")] = "parameter"


def _result_of_another_kind(data: Any) -> None:
    """What is returned is said to be the new value of an argument."""
    kinds = _kinds(data, "outputs")
    at = kinds.index("user")
    kinds[at], data["signature"]["outputs"]["columns"]["of"][at] = "mutation", "input"


def _kinds(data: Any, name: str) -> Any:
    columns = data["signature"][name]["columns"]
    columns["kind"] = expanded(columns["kind"], lambda held: held)
    return columns["kind"]


def _other_release_with_a_tuple(data: Any) -> None:
    """Another release saved it, and an operator is given the several results of another one."""
    data["torch"] = "2.12.0"
    graph = data["graphs"][0]
    at = next(at for at, name in enumerate(graph["names"]) if name.startswith("_native_batch_norm"))
    read = graph["names"].index("getitem")
    graph["reads"] = [at if number == read else number for number in graph["reads"]]


def _three_arguments(data: Any) -> None:
    at = data["tables"]["targets"].index(["function", "operator.getitem"])
    graph = data["graphs"][0]
    form = graph["forms"][graph["targets"].index(at)]
    data["tables"]["forms"][form][0].append(1)


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("forward", _without_child, "does not hold the module 0"),
        ("branch", _elsewhere, "no module holds inner.weight"),
        ("forward", _other_name, "no module holds 0.weight"),
        ("joint", _without_buffers, "no module holds 1.running_mean"),
        ("branch", _other_path, "no module holds elsewhere"),
        ("constants", _more_keys, "other keys than values"),
        ("joint", _one_for_many, "gives something else than aten"),
        ("preserved", lambda data: data["calls"].update(entry=2), "is entered in the middle"),
        ("preserved", lambda data: data["calls"].update(preserved=[0]), "the program itself is called"),
        ("branch", _self_inside, "takes what its code calls otherwise"),
        ("branch", _arguments_inside_renamed, "takes what its code calls otherwise"),
        ("branch", _named_torch, "a name that code of fx has"),
        ("branch", _called_otherwise, "cond with 2 arguments"),
        ("branch, joint", _operands_swapped, "gives its branches something else"),
        ("constants", _written_elsewhere, "is written where something else is"),
        ("sizes", _read_otherwise, "t, aten.t.default: it gives"),
        ("joint", _loss_renamed, "the loss is called other"),
        ("sizes", _reading_renamed, "a size is read from no argument"),
        ("sizes", _size_renamed, "an argument has another shape than it has"),
        ("sizes", _condition_of_a_number, "a int stands where only str may"),
        ("tangents", _gradients_swapped, "has another shape than what it is of"),
        ("tangents", _gradient_of_nothing, "the gradient grad_p_3_weight is of nothing"),
        ("tangents", _no_backward, "gradients, and no backward"),
        ("constants", _kinds_swapped, "scale is a parameter, and its numbers are of none"),
        ("attributes", _result_of_another_kind, "the result is not made of the outputs"),
        ("decomposed", _other_release_with_a_tuple, "relu, aten.relu.default: "),
        ("joint", _loss_in_the_backward, "the loss is computed in its own backward"),
        ("preserved", lambda data: data["calls"].update(preserved=[1]), "program itself is called as it was"),
        ("forward", _read_otherwise, "linear, aten.linear.default: "),
        ("forward", _other_shape, r"linear, aten.linear.default: it gives f32\[3, 8\]"),
        ("forward", _three_arguments, "getitem with 3 arguments"),
    ],
)
def test_parts_that_do_not_fit_together(kind: str, change: Callable[[Any], None], why: str) -> None:
    """What modules hold, what operators give and take, the keys of mappings: it would show first in a run, as
    Python's own error."""
    with pytest.raises(UnreadableFile, match=why):
        loaded(with_data(content(kind), change), "a file")
