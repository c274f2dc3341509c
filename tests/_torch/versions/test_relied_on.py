"""Nothing private of PyTorch enters whence without a canary that runs it.

`relied_on.py` is the list. It is held against the syntax tree of the source, and against the canaries: tests
of this folder marked with what they are canaries for. While one runs, a line of the source that uses the
private thing has to run (`conftest.py`), unless it is used at import only.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests._torch.canaries import lines_that_use, relied_on, sources, used
from tests.private_parts import uses, uses_by_name

TESTS = Path(__file__).parents[1]
RELIED_ON = relied_on()


def marks(source: str) -> Iterator[str]:
    """What the tests of a file are canaries for."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="canary"), args=names):
                parts = (part for name in names for part in ast.walk(name))
                yield from (str(part.value) for part in parts if isinstance(part, ast.Constant))


@cache
def marked() -> set[str]:
    """All that has a canary."""
    return {name for file in sorted(TESTS.rglob("test_*.py")) for name in marks(file.read_text())}


def unlisted(used: list[str], listed: set[str]) -> list[str]:
    """What is used and not in the list; a module is, when something in it is."""
    lasts = {name.rpartition(".")[2] for name in listed}
    owners = {name[:at] for name in listed for at, letter in enumerate(name) if letter == "."}
    return [name for name in used if name not in listed | owners and name[1:] not in lasts]


def test_everything_private_is_listed() -> None:
    """Every private name, attribute and variable in the syntax tree of the source is in the list."""
    assert len(sources()) > 100
    assert unlisted(sorted(used()), RELIED_ON) == []


def test_everything_listed_is_used() -> None:
    """The list has nothing that the source does not use."""
    assert [name for name in sorted(RELIED_ON) if not lines_that_use(name)] == []


def test_everything_listed_has_a_canary() -> None:
    """Every private thing of the list has a test that is marked as its canary."""
    assert sorted(RELIED_ON - marked()) == []


def test_every_canary_is_for_something_listed() -> None:
    """No test is a canary for what is not used any more."""
    assert sorted(marked() - RELIED_ON) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("import torch as t\nt.utils._pytree", "torch.utils._pytree"),
        ("import torch\n_C = torch._C\nx = _C._get_sequence_nr", "torch._C._get_sequence_nr"),
        (
            "import sys\nx = sys.modules.get('torch._dynamo.eval_frame')\nx.Box",
            "torch._dynamo.eval_frame.Box",
        ),
        ("import importlib as i\nA = 'torch._x'\nx = i.import_module(A)\nx.y", "torch._x.y"),
        ("def f(tensor): return tensor._version", "._version"),
        ("class A:\n    def f(self): return self._parameters", "._parameters"),
        ("def f(x): return getattr(x, '_version')", "._version"),
        ("def f(x): return vars(x)['_version']", "._version"),
        ("import sys\ndef f(): return sys._getframe(1).f_locals['args']", ":args"),
        ("import sys\ndef f(frame):\n    held = frame.f_locals\n    return held.get('args')", ":args"),
        ("_LOCALS = {'hook'}", ":hook"),
    ],
)
def test_private_use_is_found(source: str, name: str) -> None:
    """However it is spelled."""
    assert name in [use.name for use in uses(source)]
    assert unlisted([name], {"torch.nn.Module._modules"}) == [name]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.aten._softmax.default\n'_softmax'",
        "import sys\nsys._getframe(1).f_locals[name]",
        "class A:\n    _x: int\n    def f(self, other): return other._x",
        'def f():\n    """_version"""',
    ],
)
def test_other_use_is_not(source: str) -> None:
    """Operators, Python's own private names, our own attributes and documentation are none of PyTorch's."""
    assert uses(source) == []


def test_inherited_attributes_are_ours() -> None:
    """An attribute of `self` that a class in another file defines is ours; of another object it is not."""
    sources = {
        "a.py": "class A:\n    _x: int",
        "b.py": "class B(A):\n    def f(self, o): return self._x, o._x",
    }
    assert list(uses_by_name(sources)) == ["._x"]


def test_a_canary_that_does_not_run_it_fails(pytester: pytest.Pytester) -> None:
    """A test that is marked and does not run what it is a canary for fails and names it."""
    pytester.makeconftest("from tests._torch.conftest import runs_what_it_is_for")
    pytester.makepyfile(
        "import pytest, torch\n"
        "from whence._torch.tensors import writes_to\n"
        "pytestmark = pytest.mark.canary('torch.Tensor._version')\n"
        "def test_idle(): pass\n"
        "def test_at_work(): assert writes_to(torch.ones(1)) == 0\n"
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*nothing runs that uses torch.Tensor._version*"])
