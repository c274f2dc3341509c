"""Imports in src/whence go only downhill through the rooms of the design."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "whence"

LINES = (
    {"__init__", "__main__", "api", "captured", "cli", "demo", "models", "reported", "testing"},
    {"viewer", "distributed"},
    {"reports", "execution", "interop"},
    {"hierarchy", "guards", "tracing"},
    {"dependence", "rewriting"},
    {"program"},
    {"provenance", "_torch"},
    {"errors", "schema"},
)
ROOMS = set().union(*LINES)
NEIGHBOURS = {
    "__main__": {"cli"},
    "api": {"captured"},
    "captured": {"reported"},
    "cli": {"api", "demo", "models"},
    "demo": {"api"},
}


FILES = 12
"""No more Python files than this in one folder: what a person can take in at a glance."""


def may_import(room: str) -> set[str]:
    """The rooms this one may import: itself, those below it and, on the top line, a few neighbours."""
    if room == "__init__":
        return {"api", "_torch"}  # the door
    line = next(number for number, rooms in enumerate(LINES) if room in rooms)
    return {room}.union(NEIGHBOURS.get(room, set()), *LINES[line + 1 :])


def imported_names(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Line and absolute dotted name of everything imported, wherever in the file."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name.split(".")) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) + 1 - level] if level else ()
                inner = module.split(".") if module else []
                yield from ((node.lineno, [*base, *inner, alias.name]) for alias in names)


def imported_rooms(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and room of every import from whence; a name that is no room is one of the facade's."""
    for line, (top, *inner) in imported_names(tree, package):
        if top == "whence":
            yield line, inner[0] if inner and inner[0] in ROOMS else "api"


def violations(path: str, source: str) -> list[str]:
    """Every import in this file, named by its path in the package, that does not go downhill."""
    file = PurePath(path)
    room = file.with_suffix("").parts[0]
    if room not in ROOMS:
        return [f"{path}: {room} is not a room of the design"]
    imports = imported_rooms(ast.parse(source), ("whence", *file.parent.parts))
    return [f"{path}:{line}: imports {other}" for line, other in imports if other not in may_import(room)]


TWO_WAY = {
    "_torch/deciding, _torch/record",
    "_torch/higher_order, _torch/record",
    "_torch/operators, _torch/record",
}
"""Folders of one room that still know each other: the recorder of PyTorch's calls, and what it asks."""


def imports_at_run_time(tree: ast.Module) -> Iterator[str]:
    """The module of every import from whence that is not for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whence."):
            yield str(node.module)


def knowing_each_other(files: dict[str, str]) -> set[str]:
    """Pairs of folders, neither inside the other, that import one another; files by their paths."""
    known = {
        (folder, other)
        for path, source in files.items()
        for module in imports_at_run_time(ast.parse(source))
        for folder, other in [
            (PurePath(path).parent, PurePath(module.removeprefix("whence.").replace(".", "/")).parent)
        ]
        if not folder.is_relative_to(other) and not other.is_relative_to(folder)
    }
    return {", ".join(sorted(map(str, pair))) for pair in known if pair[::-1] in known}


def test_folders_of_a_room_do_not_know_each_other() -> None:
    """Inside a room imports go one way, too: what is left of the other kind is listed, and goes."""
    files = {str(file.relative_to(SOURCE)): file.read_text() for file in sorted(SOURCE.rglob("*.py"))}
    assert knowing_each_other(files) == TWO_WAY


def test_folders_that_know_each_other_are_found() -> None:
    """But for what is imported for types alone, and for a folder and what lies in it."""
    files = {"a/x/one.py": "from whence.a.y.two import f", "a/y/three.py": "from whence.a.x.one import g"}
    assert knowing_each_other(files) == {"a/x, a/y"}
    files["a/y/three.py"] = "if TYPE_CHECKING:\n    from whence.a.x.one import g"
    assert knowing_each_other(files) == set()
    assert knowing_each_other({"a/one.py": "from whence.a.x.two import f", "a/x/two.py": ""}) == set()


def test_folders_can_be_taken_in() -> None:
    """No folder of the package holds more files than a person can take in."""
    files = Counter(file.parent.relative_to(SOURCE) for file in SOURCE.rglob("*.py"))
    assert {str(folder): count for folder, count in files.items() if count > FILES} == {}


def test_imports_go_downhill() -> None:
    """No file of the package imports a room beside or above its own."""
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    assert [
        line for file in files for line in violations(str(file.relative_to(SOURCE)), file.read_text())
    ] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("program/graph.py", "from whence.rewriting import Pass"),
        ("program/graph.py", "def late():\n    import whence.tracing.recording.run"),
        ("program/graph.py", "from ..rewriting import Pass"),
        ("program/graph.py", "from .. import rewriting"),
        ("program/graph.py", "from whence import capture"),
        ("api.py", "import whence.cli"),
    ],
)
def test_uphill_import_is_found(path: str, source: str) -> None:
    """An import of a room above is found, however it is spelled."""
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("rewriting/fuse.py", "from whence.guards import Guard"),
        ("viewer/__init__.py", "from whence import distributed"),
        ("errors.py", "from . import schema"),
        ("testing.py", "from whence.api import capture"),
        ("__init__.py", "from whence.errors import WhenceError"),
    ],
)
def test_same_line_import_is_found(path: str, source: str) -> None:
    """Rooms on one line do not know each other, and the package's face knows the facade only."""
    assert len(violations(path, source)) == 1


def test_unknown_room_is_found() -> None:
    """A file outside the rooms of the design has no place to import from."""
    assert violations("helpers/text.py", "") == ["helpers/text.py: helpers is not a room of the design"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("rewriting/fuse.py", "import torch\nfrom whence.program import Program\nfrom . import infra"),
        ("program/deep/graph.py", "from ...errors import WhenceError\nfrom ..table import Table"),
        ("cli.py", "from whence import api, demo"),
        ("demo.py", "import whence"),
        ("__init__.py", "from whence.api import capture"),
    ],
)
def test_downhill_import_is_allowed(path: str, source: str) -> None:
    """Rooms below, the own room and the named neighbours may be imported."""
    assert violations(path, source) == []
