"""Programs that are kept between processes are used while nothing changed that they read, and never after."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import same_bits
from tests.interop.archive.programs import Noting, X, layered, sine
from whence import api
from whence.errors import UsageError

HELPER = """
FACTOR = 2.0

def scaled(x):
    return x * FACTOR

def unused(x):
    return x
"""
MODEL = """
import torch
from torch import nn
import helper_of_cache

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.depth = 2
        self.bias = [torch.ones(4), 1]

    def forward(self, x):
        for _ in range(self.depth):
            x = helper_of_cache.scaled(self.layer(x))
        return x + self.bias[0] * self.bias[1]
"""


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The captures that were made."""
    made: list[object] = []
    real: Callable[..., Any] = api.capture

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(api, "capture", noted)
    yield made


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's with a helper beside it, in files that may be changed."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "helper_of_cache.py").write_text(HELPER)
    (folder / "model_of_cache.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield importlib.import_module("model_of_cache")
    for name in ("model_of_cache", "helper_of_cache"):
        sys.modules.pop(name, None)


def test_the_second_call_does_not_capture(tmp_path: Path, captures: list[object]) -> None:
    """It gives the program that was kept, on the live model's tensors, with the loss that was asked for."""
    model = layered()
    first = whence.cached(model, (X,), directory=tmp_path, backward=sine)
    second = whence.cached(model, (X,), directory=tmp_path, backward=sine)
    assert len(captures) == 1 and str(first) == str(second)
    assert second.loss_function is sine and second.verify(model, (X,)).ok
    assert next(second.unflatten().parameters()) is next(model.parameters())
    another = layered()
    third = whence.cached(another, (X,), directory=tmp_path, backward=sine)
    assert next(third.unflatten().parameters()) is next(another.parameters())
    assert len(captures) == 1


@dataclass
class Settings:
    """Whose methods Python writes."""

    scale: float = 2.0


class Configured(nn.Module):
    """Keeps its settings, as models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.layer = Settings(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Reads one of them."""
        return self.layer(x) * self.settings.scale


def test_models_with_dataclasses_are_kept(tmp_path: Path, captures: list[object]) -> None:
    """Code that Python writes for a class is in no file; guards compare it."""
    model = Configured()
    for _ in range(2):
        whence.cached(model, (X,), directory=tmp_path)
    assert len(captures) == 1
    model.settings.scale = 3.0
    whence.cached(model, (X,), directory=tmp_path)
    assert len(captures) == 2


def test_constants_are_those_of_the_model(tmp_path: Path, captures: list[object]) -> None:
    """A tensor that a module holds unregistered is read from the live model, too."""
    model = Noting()
    whence.cached(model, (X,), directory=tmp_path)
    model.scale = model.scale * 2
    again = whence.cached(model, (X,), directory=tmp_path)
    assert same_bits(again.module()(X)["scaled"], X * model.scale * 2.0)


@pytest.mark.parametrize(
    "options",
    [{"backward": True}, {"backward": sine}, {"state": "attributes"}, {"preserve_calls": "0"}],
    ids=["tangents", "loss", "attributes", "preserved"],
)
def test_other_options_are_another_program(
    options: dict[str, Any], tmp_path: Path, captures: list[object]
) -> None:
    """Each has its own, and each is found again."""
    model = layered()
    whence.cached(model, (X,), directory=tmp_path)
    for _ in range(2):
        found = whence.cached(model, (X,), directory=tmp_path, **options)
    assert len(captures) == 2 and str(found) == str(whence.capture(model, (X,), **options))


def _evaluated(model: nn.Module) -> None:
    model.eval()


def _replaced(model: nn.Module) -> None:
    model[2] = nn.GELU()  # type: ignore[operator]


def _hooked(model: nn.Module) -> None:
    model.register_forward_hook(lambda *_: None)


def _frozen(model: nn.Module) -> None:
    model.requires_grad_(False)


def _tied(model: nn.Module) -> None:
    model[4].weight = model[3].weight  # type: ignore[index]


@pytest.mark.parametrize("change", [_evaluated, _replaced, _hooked, _frozen, _tied])
def test_a_changed_model_is_captured_anew(
    change: Callable[[nn.Module], None], tmp_path: Path, captures: list[object]
) -> None:
    """Whatever a check would see misses; the model as it was is found again."""
    whence.cached(layered(), (X,), directory=tmp_path)
    changed = layered()
    change(changed)
    whence.cached(changed, (X,), directory=tmp_path)
    assert len(captures) == 2
    whence.cached(layered(), (X,), directory=tmp_path)
    assert len(captures) == 2


def test_other_arguments_and_switches_miss(tmp_path: Path, captures: list[object]) -> None:
    """Shapes, dtypes, keywords, and modes of the process."""
    model = layered()
    calls: list[Callable[[], object]] = [
        lambda: whence.cached(model, (X,), directory=tmp_path),
        lambda: whence.cached(model, (torch.randn(5, 4),), directory=tmp_path),
        lambda: whence.cached(model, kwargs={"input": X}, directory=tmp_path),
    ]
    for _ in range(2):
        for call in calls:
            call()
    with torch.autocast("cpu"):
        calls[0]()
    assert len(captures) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda m, _: setattr(m.helper_of_cache, "FACTOR", 3.0),
        lambda m, model: setattr(model, "depth", 3),
        lambda m, model: model.bias.__setitem__(1, 5),
        lambda m, model: model.bias.__setitem__(0, torch.zeros(4)),
        lambda m, _: setattr(m.helper_of_cache, "scaled", lambda x: x - 1),
        lambda m, _: setattr(m.Model, "forward", lambda self, x: x),
        lambda m, _: setattr(m, "range", lambda count: range(count + 1)),
        lambda *_: setattr(nn.functional, "linear", lambda x, *_: x),
    ],
    ids=(
        *("a global", "an attribute", "an item", "a tensor in a list", "a function", "a method"),
        *("a variable that covers a builtin", "a function of PyTorch's"),
    ),
)
def test_changed_values_and_functions_miss(
    change: Callable[[Any, Any], None],
    code: Any,
    tmp_path: Path,
    captures: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variables, attributes, what lists hold, and code that was replaced."""
    monkeypatch.setattr(nn.functional, "linear", nn.functional.linear)
    torch.manual_seed(0)
    model = code.Model()
    whence.cached(model, (X,), directory=tmp_path / "kept")
    whence.cached(model, (X,), directory=tmp_path / "kept")
    assert len(captures) == 1
    change(code, model)
    program = whence.cached(model, (X,), directory=tmp_path / "kept")
    assert len(captures) == 2 and torch.equal(program.module()(X), model(X))


@pytest.mark.parametrize("name", ["helper_of_cache.py", "model_of_cache.py"])
def test_changed_files_miss(name: str, code: Any, tmp_path: Path, captures: list[object]) -> None:
    """Also where what changed is not what ran, and where time and length of the file are as they were."""
    model, path = code.Model(), tmp_path / "code" / name
    whence.cached(model, (X,), directory=tmp_path / "kept")
    then = path.stat()
    path.write_text(path.read_text().replace("x", "y"))
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    whence.cached(model, (X,), directory=tmp_path / "kept")
    assert len(captures) == 2


@pytest.mark.sample(4)
@pytest.mark.parametrize("suffix", [".whence", ".json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"PK\x03\x04"])
def test_broken_files_are_captured_anew(
    suffix: str, content: bytes, tmp_path: Path, captures: list[object]
) -> None:
    """Half written, emptied, of somebody else."""
    model = layered()
    whence.cached(model, (X,), directory=tmp_path)
    for path in tmp_path.glob(f"*{suffix}"):
        path.write_bytes(content)
    program = whence.cached(model, (X,), directory=tmp_path)
    assert len(captures) == 2
    assert torch.equal(program.module(copy=True)(X), layered()(X))


class WithProperty(nn.Module):
    """Reads a property whose function has no code, and no name."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor  # type: ignore[operator]


WithProperty.factor = property(attrgetter("training"))  # type: ignore[attr-defined]


def test_what_cannot_be_compared_is_said(tmp_path: Path, captures: list[object]) -> None:
    """Such a program is captured every time, and a warning says why."""
    for _ in range(2):
        with pytest.warns(whence.NotKept, match="is not kept: a attrgetter cannot be compared"):
            whence.cached(WithProperty(), (X,), directory=tmp_path)
    assert len(captures) == 2 and list(tmp_path.iterdir()) == []


def _twice(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        return function(function(x))

    return inner


WRAPPED, UNDER_KEYS, HERE = _twice(torch.sin), {"a": _twice(torch.sin)}, sys.modules[__name__]


class OfModule(nn.Module):
    """Calls a function that was made inside another one, which a file has under a name."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = HERE.WRAPPED(x)
        return result


class OfTable(nn.Module):
    """Calls one that no name leads to."""

    def forward(self, x: Tensor) -> Tensor:
        return UNDER_KEYS["a"](x)


def test_functions_that_are_taken_out_of_a_module_are_found(tmp_path: Path, captures: list[object]) -> None:
    """What they close over is compared there."""
    for _ in range(2):
        whence.cached(OfModule(), (X,), directory=tmp_path)
    assert len(captures) == 1


def test_the_guard_that_cannot_be_compared_is_named(tmp_path: Path) -> None:
    """A reader could not know what of the model it is."""
    with pytest.warns(
        whence.NotKept, match="is not kept: .*closure function.* cannot be compared in another"
    ):
        whence.cached(OfTable(), (X,), directory=tmp_path)


def test_what_no_file_holds_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that cannot be stored is given all the same."""
    namespace: dict[str, Any] = {"nn": nn, "__name__": "__console__"}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        return x + 1", namespace)
    with pytest.warns(whence.NotKept, match="is not kept"):
        program = whence.cached(namespace["Typed"](), (X,), directory=tmp_path)
    assert torch.equal(program.module()(X), X + 1)


def test_options_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    """What nobody could check: strict captures, losses with values of their own."""
    held = 2.0
    for options in ({"strict": True}, {"backward": lambda y: y.sum() * held}, {"backward": nn.MSELoss()}):
        with pytest.raises(UsageError, match="cannot be kept"):
            whence.cached(layered(), (X,), directory=tmp_path, **options)


IN_ANOTHER_PROCESS = """
import sys, torch, whence, model_of_cache
from whence import api
made, real = [], api.capture
api.capture = lambda *a, **k: (made.append(1), real(*a, **k))[1]
torch.manual_seed(0)
model, x = model_of_cache.Model(), torch.ones(3, 4)
program = whence.cached(model, (x,), directory=sys.argv[1])
assert torch.equal(program.module()(x), model(x))
print(len(made))
"""


IMPORTS_FIRST = """
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        %s
"""


@pytest.mark.parametrize(
    "body",
    [
        "import helper_of_cache; return helper_of_cache.scaled(x)",
        "from helper_of_cache import FACTOR; return x * FACTOR",
        "from helper_of_cache import scaled; return scaled(x)",
    ],
)
def test_what_a_forward_imports_first_is_said(body: str, code: Any, tmp_path: Path) -> None:
    """Another process, where that module is not loaded, captures again: the warning says what to import."""
    (tmp_path / "code" / "model_of_cache.py").write_text(IMPORTS_FIRST % body)
    del sys.modules["helper_of_cache"]
    importlib.invalidate_caches()
    model = importlib.reload(code).Model()
    said = "found by other processes only where helper_of_cache is loaded: .*`import helper_of_cache` before"
    with pytest.warns(whence.NotKept, match=said):
        whence.cached(model, (X,), directory=tmp_path / "kept")
    whence.cached(model, (X,), directory=tmp_path / "kept")
    del sys.modules["helper_of_cache"]
    with pytest.warns(whence.NotKept, match=said):
        whence.cached(model, (X,), directory=tmp_path / "kept")


@pytest.mark.sweep
def test_another_process_finds_it(code: Any, tmp_path: Path) -> None:
    """And captures anew where the code is another."""
    folder = tmp_path / "code"

    def run() -> str:
        paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "kept")]
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    assert [run(), run()] == ["1\n", "0\n"]
    (folder / "helper_of_cache.py").write_text(HELPER.replace("x * FACTOR", "x + FACTOR"))
    assert run() == "1\n"
