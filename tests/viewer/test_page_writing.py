"""Where a page is written, and what it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.viewer.reading import data_of, program_of
from whence.errors import SelectionError
from whence.viewer import file_name


def test_view_writes_where_it_is_told(tmp_path: Path) -> None:
    """And says where that is; without a path it is a new file that is named for the program."""
    there = program_of().view(tmp_path / "page.html")
    assert there == tmp_path / "page.html"
    assert data_of(there.read_text(encoding="utf-8"))["programs"][0]["name"] == "Named"
    temporary = program_of().view()
    assert temporary.name == "whence-Named.html"
    temporary.unlink()
    temporary.parent.rmdir()


def test_names_of_files_are_names_everywhere() -> None:
    """Whatever a function is called."""
    assert file_name("<lambda>") == "whence-lambda.html"
    assert file_name("../..") == "whence-program.html"


def test_values_are_by_node(tmp_path: Path) -> None:
    """Numbers of one's own stand at their nodes, no colour is there for infinity, no node is refused."""
    program = program_of()
    first, second = (node.name for node in program.select("**")[:2])
    text = program.view(tmp_path / "page.html", values={first: 2.5, second: float("nan")}).read_text()
    (drawn,) = data_of(text)["programs"]
    assert [value for value in drawn["values"] if value is not None] == [2.5]
    assert drawn["values"][drawn["nodes"]["name"].index(first)] == 2.5
    with pytest.raises(SelectionError, match="no node is called 'nothing'"):
        program.view(tmp_path / "page.html", values={"nothing": 1.0})
