"""The source of whence keeps its shape: short functions, short files, no shortcuts."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "whence"
FUNCTION_LINES = 60
FILE_LINES = 500
SHARED_NAMES = 0.15
"""The share of functions that may be called as one of another file; it goes down."""
SAME_NAME = 4
"""In so many files a function may have one name."""
BROAD = {"Exception", "BaseException"}


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring included and its decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def is_broad(caught: ast.expr | None) -> bool:
    """Whether an except clause catches everything, alone or in a tuple."""
    return caught is None or any(isinstance(n, ast.Name) and n.id in BROAD for n in ast.walk(caught))


def node_faults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and fault of everything in the tree that we do not write."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if (lines := length(node)) > FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines"
            case ast.Assert(lineno=line):
                yield line, "assert: raise one of our errors"
            case ast.ExceptHandler(lineno=line, type=caught) if is_broad(caught):
                yield line, "broad except: name what is caught"
            case ast.Call(lineno=line, func=ast.Name(id="print")):
                yield line, "print: log it, or let the command line write it"


ASKS_CODE_OF_THE_USER = "dependence/asking.py"
"""Here, and nowhere else, any exception may be caught: it is handed on as what was found."""


def faults(source: str) -> list[str]:
    """Every fault of one file."""
    lines = len(source.splitlines())
    too_long = [f"1: the file has {lines} lines"] if lines > FILE_LINES else []
    return too_long + [f"{line}: {fault}" for line, fault in node_faults(ast.parse(source))]


def test_class_names_stand_once() -> None:
    """Whoever looks for a class finds one."""
    files = sorted(SOURCE.rglob("*.py"))
    names = [
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name, count in Counter(names).items() if count > 1]


def functions_by_name(files: dict[str, str]) -> dict[str, set[str]]:
    """The files, by their paths, in which each function of a module is written."""
    found: dict[str, set[str]] = {}
    for path, source in files.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, set()).add(path)
    return found


def shared_share(found: dict[str, set[str]]) -> float:
    """How many functions of modules are called as one of another file, of all."""
    counts = [len(files) for files in found.values()]
    return sum(count for count in counts if count > 1) / sum(counts)


def test_functions_are_named_for_what_they_do() -> None:
    """Few are called as one of another file, and none as those of many: one meaning a word."""
    files = {str(file.relative_to(SOURCE)): file.read_text() for file in sorted(SOURCE.rglob("*.py"))}
    found = functions_by_name(files)
    assert {name: sorted(files) for name, files in found.items() if len(files) > SAME_NAME} == {}
    assert shared_share(found) < SHARED_NAMES


def test_functions_of_one_name_are_counted() -> None:
    """Methods, and functions inside others, are not among them."""
    inner = "class A:\n    def one(self): ...\ndef two():\n    def one(): ..."
    found = functions_by_name({"a": "def one(): ...", "b": "async def one(): ...", "c": inner})
    assert found == {"one": {"a", "b"}, "two": {"c"}}
    assert shared_share(found) == 2 / 3


def test_source_keeps_its_shape() -> None:
    """No file of the package has a fault."""
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    found = [f"{file.relative_to(SOURCE)}:{fault}" for file in files for fault in faults(file.read_text())]
    (asking,) = [fault for fault in found if fault.startswith(ASKS_CODE_OF_THE_USER)]
    assert "broad except" in asking
    assert [fault for fault in found if fault != asking] == []


@pytest.mark.parametrize(
    "source",
    [
        "def long():\n" + "    pass\n" * FUNCTION_LINES,
        "class A:\n    async def long(self):\n" + "        pass\n" * FUNCTION_LINES,
        "pass\n" * (FILE_LINES + 1),
        "assert True",
        "try:\n    pass\nexcept:\n    pass",
        "try:\n    pass\nexcept Exception as error:\n    pass",
        "try:\n    pass\nexcept (KeyError, BaseException):\n    pass",
        "print('here')",
    ],
)
def test_fault_is_found(source: str) -> None:
    """Each fault is found where it stands."""
    assert len(faults(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def short():\n" + "    pass\n" * (FUNCTION_LINES - 1),
        "pass\n" * FILE_LINES,
        "try:\n    pass\nexcept (KeyError, ValueError):\n    raise",
        "console.print('here')",
    ],
)
def test_good_shape_is_allowed(source: str) -> None:
    """What stays inside the limits is no fault."""
    assert faults(source) == []
