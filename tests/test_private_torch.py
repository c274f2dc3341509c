"""Private torch enters whence through whence._torch alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "whence"


def is_private(name: str) -> bool:
    """Whether a dotted name lies in torch's private parts; operators (torch.ops.aten._softmax) do not."""
    top, *inner = name.split(".")
    if top != "torch" or inner[:1] == ["ops"]:
        return False
    return inner[:2] == ["fx", "experimental"] or any(
        part.startswith("_") and not part.startswith("__") for part in inner
    )


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str, str]]:
    """Line, dotted name, local name and what the local name stands for, of every absolute import."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    top = alias.name.split(".")[0]
                    yield node.lineno, alias.name, alias.asname or top, alias.name if alias.asname else top
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    name = f"{module}.{alias.name}"
                    yield node.lineno, name, alias.asname or alias.name, name


def dotted(node: ast.expr, known: dict[str, str]) -> str:
    """The absolute name of `a.b.c` where `a` was imported, else the empty text."""
    match node:
        case ast.Name(id=name):
            return known.get(name, "")
        case ast.Attribute(value=value, attr=attr):
            owner = dotted(value, known)
            return owner and f"{owner}.{attr}"
    return ""


def private_uses(source: str) -> list[str]:
    """Every private torch name that this source imports or reaches through an attribute."""
    tree = ast.parse(source)
    imported = list(imports(tree))
    known = {local: meaning for _, _, local, meaning in imported}
    uses = {(line, name) for line, name, _, _ in imported}
    uses |= {(n.lineno, dotted(n, known)) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return [f"{line}: {name}" for line, name in sorted(uses) if is_private(name)]


def test_private_torch_has_one_door() -> None:
    """Outside _torch no file of the package uses private torch."""
    files = [file for file in sorted(SOURCE.rglob("*.py")) if SOURCE / "_torch" not in file.parents]
    assert files
    assert [
        f"{file.relative_to(SOURCE)}:{use}" for file in files for use in private_uses(file.read_text())
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch import _C",
        "from torch._ops import OpOverload",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "from torch.utils import _pytree as pytree",
        "def late():\n    import torch.fx.experimental as e",
        "import torch\ntorch._C",
        "import torch as t\nt.utils._pytree",
        "from torch import fx\nfx.experimental",
        "from torch.autograd import graph\ngraph._engine_run_backward",
    ],
)
def test_private_use_is_found(source: str) -> None:
    """Private torch is found, imported or reached, under any local name."""
    assert len(private_uses(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from torch import fx, nn\nfx.GraphModule",
        "import torch\ntorch.ops.aten._softmax.default\ntorch.__version__",
        "from whence._torch import make_fx\nself._graph",
    ],
)
def test_public_use_is_allowed(source: str) -> None:
    """Public torch, its operators and our own private names are free to use."""
    assert private_uses(source) == []
