"""Releases of PyTorch: those that nobody tried, those that lack something, and who asks for the release."""

import ast
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from whence._torch.versions import door, finding
from whence._torch.versions.release import TRIED, is_tried, warn_if_untried
from whence._torch.versions.relied_on import ATTRIBUTES, NAMES, VARIABLES
from whence.errors import UnsupportedRelease, UntriedRelease

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "whence"

IMPORTING = """
import sys, warnings, torch, torch.overrides
torch.__version__ = "2.16.0"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import whence, whence.cli
print([str(warning.message) for warning in caught if warning.category is whence.UntriedRelease])
print(any(name.startswith(("torch._dynamo.", "sympy.")) for name in sys.modules))

for name in [name for name in sys.modules if name.partition(".")[0] == "whence"]:
    del sys.modules[name]
del torch.overrides._pop_mode, torch._C._current_graph_task_id, torch.autograd.graph.Node
try:
    import whence
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def imported() -> str:
    """What a process says that imports whence with a release of tomorrow, then with one that lacks names."""
    run = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True)
    return run.stdout


@pytest.mark.sweep
def test_an_untried_release_gives_one_warning(imported: str) -> None:
    """One at import, of a class of ours, that names the release and those that were tried."""
    told = ast.literal_eval(imported.splitlines()[0])
    assert len(told) == 1
    assert "PyTorch 2.16.0" in told[0]
    assert all(release in told[0] for release in TRIED)


@pytest.mark.sweep
def test_looking_for_names_loads_nothing(imported: str) -> None:
    """What whence loads when it needs it is not loaded to look for names in it."""
    assert imported.splitlines()[1] == "False"


def test_an_import_without_private_names_is_one_error(imported: str) -> None:
    """It names the release, all that is gone (used at import or later, private or public), and the remedy."""
    _, _, *error = imported.splitlines()
    assert error[0] == (
        "UnsupportedRelease [WH402] PyTorch 2.16.0 has no torch._C._current_graph_task_id; "
        "PyTorch 2.16.0 has no torch.overrides._pop_mode; PyTorch 2.16.0 has no torch.autograd.graph.Node"
    )
    assert error[2] == "  what to do: install torch 2.13 to 2.15, or a whence that knows this release"


@pytest.mark.parametrize(
    ("version", "tried"),
    [
        *(("2.13.0+cpu", True), ("2.14.1", True), ("2.15.7+cu132", True), ("2.16.0", False)),
        *(("2.15.0a0+git0", False), ("2.15.0.dev20261101", False), ("3.13.0", False), ("2.1.5", False)),
    ],
)
def test_repairs_of_a_tried_release_are_tried(version: str, tried: bool) -> None:
    """A repair or another build of a release counts as tried; what comes before a release does not."""
    assert is_tried(version) is tried
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_untried(version)
    assert [warning.category for warning in caught] == ([] if tried else [UntriedRelease])


def test_this_release_is_tried() -> None:
    """The tests run on releases that are listed as tried."""
    assert is_tried(str(torch.__version__))


def test_everybody_names_the_same_releases() -> None:
    """What is promised, what is developed on (the oldest) and what is tested besides fit the list."""
    oldest, between, newest = TRIED
    major, minor = newest.split(".")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={oldest},<{major}.{int(minor) + 1}" in project["dependencies"]
    assert f"torch=={oldest}.0\n" in (ROOT / "constraints.txt").read_text()
    assert (ROOT / "requirements" / "newest.txt").read_text().startswith(f"torch=={newest}.")
    assert (ROOT / "requirements" / "between.txt").read_text().startswith(f"torch=={between}.")
    assert f"torch=={oldest}.0" in (ROOT / "Makefile").read_text()
    steps = (ROOT / ".ci" / "run").read_text()
    assert "test-newest" in steps
    assert "test-between" in steps


def test_errors_of_others_stay_their_own() -> None:
    """An error while whence is imported that has another cause than a missing name is not replaced."""
    with pytest.raises(ImportError, match="no module of that name") as caught, door.entered():
        raise ImportError("no module of that name")
    assert not isinstance(caught.value, UnsupportedRelease)


def test_what_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name, an attribute and a variable that PyTorch does not have are told from those it has."""
    monkeypatch.setitem(NAMES, "torch._C", "_no_such_function _is_fwd_grad_enabled")
    monkeypatch.setitem(NAMES, "torch._C._NoSuchClass", "method")
    monkeypatch.setitem(ATTRIBUTES, "torch.nn.Module", "_no_such_table _parameters")
    monkeypatch.setitem(VARIABLES, "torch.nn.Module._call_impl", "no_such_variable hook")
    gone = ["torch._C._no_such_function", "torch._C._NoSuchClass.method"]
    assert finding.names_gone(load=False) == gone
    assert [name for name, is_there in finding.looked_for().items() if not is_there] == [
        *gone,
        "torch.nn.Module._no_such_table",
        "torch.nn.Module._call_impl.no_such_variable",
    ]


# --- nothing else asks for the release ---------------------------------------------------------------


def asks_for_release(source: str) -> list[int]:
    """The lines that ask which release of torch this is, or try whether it has a name."""
    return sorted(
        getattr(node, "lineno", 0)
        for node in ast.walk(ast.parse(source))
        if _is_version(node) or _is_probe(node) or _is_attempt(node)
    )


def _is_version(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="__version__" | "version", value=ast.Name(id="torch")):
            return True
        case ast.ImportFrom(module="torch.torch_version" | "torch.version" | "packaging.version"):
            return True
        case ast.ImportFrom(module="torch", names=names):
            return any(alias.name in ("__version__", "version", "torch_version") for alias in names)
        case ast.Call(func=ast.Name(id="version"), args=[ast.Constant(value="torch")]):
            return True
    return False


def _is_probe(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="hasattr"), args=[owner, _]):
            return _is_of_torch(owner)
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(), _]):
            return _is_of_torch(owner)
    return False


def _is_of_torch(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def _is_attempt(node: ast.AST) -> bool:
    """Whether something of torch is imported as far as it is there."""
    if not isinstance(node, ast.Try):
        return False
    imports = [part for statement in node.body for part in ast.walk(statement)]
    return any(
        isinstance(part, ast.ImportFrom) and (part.module or "").split(".")[0] == "torch" for part in imports
    )


def test_nothing_else_asks_for_the_release() -> None:
    """Outside `_torch/versions` no file asks for the version or tries whether PyTorch has a name."""
    files = [file for file in sorted(SOURCE.rglob("*.py")) if file.parent.name != "versions"]
    assert len(files) > 100
    assert [
        f"{file.relative_to(SOURCE)}:{line}" for file in files for line in asks_for_release(file.read_text())
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nif torch.__version__ >= '2.14': ...",
        "from torch.torch_version import TorchVersion",
        "from torch import __version__",
        "import importlib.metadata as m\nfrom importlib.metadata import version\nversion('torch')",
        "import torch\nhasattr(torch.overrides, '_pop_mode')",
        "import torch\ngetattr(torch.compiler, '_flag', None)",
        "try:\n    from torch._opaque_base import OpaqueBase\nexcept ImportError: ...",
    ],
)
def test_asking_for_the_release_is_found(source: str) -> None:
    """However it is asked."""
    assert len(asks_for_release(source)) == 1
