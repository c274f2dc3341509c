"""What an earlier release of PyTorch or of whence saved loads for good, or says what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from tests.interop.archive.mutations import members, with_data
from tests.interop.archive.programs import content, layered
from tests.interop.archive.releases import FILES, KINDS, results
from whence._torch.versions.release import release
from whence.captured import loaded
from whence.errors import UnreadableFile

NAMES = sorted(path.stem for path in FILES.glob("*.whence"))


def equal(one: Any, other: Any) -> bool:
    """Whether two results are equal in every bit."""
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_kept_files_compute_what_a_capture_of_today_computes(name: str) -> None:
    """Every result, bit by bit, on the weights of the file; pages, guards and costs are there, too."""
    found = whence.load(FILES / f"{name}.whence")
    now = KINDS[name.partition("-")[2]]()
    before, today = results(found, found.state), results(now, found.state)
    assert before.keys() == today.keys()
    assert [key for key in today if not equal(before[key], today[key])] == []
    for page in (str, lambda each: str(each.guards), lambda each: str(each.report())):
        assert page(found)


@pytest.mark.parametrize("name", NAMES)
def test_kept_files_are_saved_again_as_they_are(name: str, tmp_path: Path) -> None:
    """A file that was loaded and saved holds the same program."""
    found = whence.load(FILES / f"{name}.whence")
    found.save(tmp_path / "again.whence")
    again = whence.load(tmp_path / "again.whence")
    assert str(again) == str(found)
    assert str(again.guards) == str(found.guards)


def test_kept_files_are_of_several_releases() -> None:
    """Among them the first that whence wrote, which had no history."""
    data = [json.loads(members((FILES / f"{name}.whence").read_bytes())["program.json"]) for name in NAMES]
    assert len({each["torch"] for each in data}) == 3
    assert any("history" not in each for each in data)


def _arguments(forms: list[Any], change: Any) -> None:
    form = next(form for form in forms if len(form[0]) == 3 and not form[1])  # of a linear layer
    change(form)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda form: form[0].append(1), "aten.linear.default with 4 arguments"),
        (lambda form: form[1].append(["scale", 2]), "aten.linear.default with the argument scale"),
    ],
)
def test_an_operator_with_other_arguments_is_named(change: Any, words: str) -> None:
    """A release may have given it other ones: the error says which, and that is all that is wrong."""

    def changed(data: Any) -> None:
        _arguments(data["tables"]["forms"], change)

    with pytest.raises(UnreadableFile, match=words):
        loaded(with_data(content("forward"), changed), "a file")


def test_code_of_another_release_is_said_to_differ() -> None:
    """Functions have the same names in every release, so a check says that their code differs, and of which
    release it was."""

    def changed(data: Any) -> None:
        data["torch"] = "2.13.7"
        columns = data["guards"]["rows"]["columns"]["expected"]
        for row in columns["distinct"] if isinstance(columns, dict) else columns:
            if "ExpectedFunction" in row:
                row["ExpectedFunction"]["code"] = "0" * 64

    file = with_data(content("forward"), changed)
    told = loaded(file, "a file", layered()).check(layered())
    said = f"with other code (captured with PyTorch 2.13.7, this is {release()}) now"
    (linear,) = (row.change for row in told if row.guard.what == "Linear.forward")
    assert linear.endswith(f"is Linear.forward {said}")
