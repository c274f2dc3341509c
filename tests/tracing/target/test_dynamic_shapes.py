"""Sizes that nobody named, beside those that somebody did: against what torch.export takes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence

PAIRS = ((5, 5), (3, 3), (4, 4), (8, 8), (3, 4), (1, 1), (0, 0), (2, 2))
X, Y = torch.randn(5, 2), torch.randn(5, 2)


class Sum(nn.Module):
    """Two sizes that must be equal."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Side(nn.Module):
    """Likewise, by another operator."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1)


class Twice(nn.Module):
    """One size must be the double of the other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, x]) + y


def admitted(module: Callable[..., Any], pairs: tuple[tuple[int, int], ...] = PAIRS) -> list[tuple[int, int]]:
    """The sizes with which a module can be called."""
    found = []
    for rows in pairs:
        try:
            module(*(torch.randn(size, 2) for size in rows))
        except (whence.CallError, AssertionError, RuntimeError):
            continue
        found.append(rows)
    return found


NAMES = ("a", "z", "_", "s0", "x0")
HINTS = {"auto": Dim.AUTO, "dynamic": Dim.DYNAMIC}


@pytest.mark.sample(1)
@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("model", [Sum(), Side()], ids=["sum", "side"])
def test_a_named_size_may_equal_a_free_one(model: nn.Module, hint: str) -> None:
    """Whatever its name and its place, a `Dim` may turn out equal to a size that nobody named, which is then
    called by that name."""
    expected = [pair for pair in PAIRS if pair[0] == pair[1]]
    for name in NAMES:
        for shapes in (
            {"x": {0: Dim(name)}, "y": {0: HINTS[hint]}},
            {"x": {0: HINTS[hint]}, "y": {0: Dim(name)}},
        ):
            program = whence.capture(model, (X, Y), dynamic_shapes=shapes)
            assert admitted(program.module()) == expected
            assert str(program.shapes["args[0]"]).startswith(f"f32[{name}, 2]")


@pytest.mark.parametrize("named", ["x", "y"])
def test_a_free_size_may_be_related_to_a_named_one(named: str) -> None:
    """What relates them is a rule, whichever of the two has a name."""
    shapes = {name: {0: Dim("rows") if name == named else Dim.AUTO} for name in "xy"}
    program = whence.capture(Twice(), (X, torch.randn(10, 2)), dynamic_shapes=shapes)
    assert admitted(program.module(), ((3, 6), (3, 5), (1, 2), (9, 18))) == [(3, 6), (1, 2), (9, 18)]


BOUNDED: dict[str, tuple[Any, Any]] = {
    "first": (Dim.AUTO(min=3, max=6), Dim.AUTO),
    "second": (Dim.AUTO, Dim.AUTO(min=3, max=6)),
    "ends": (Dim.AUTO(min=3), Dim.AUTO(max=6)),
    "both": (Dim.DYNAMIC(min=3, max=6), Dim.DYNAMIC(min=4, max=9)),
    "mixed": (Dim.DYNAMIC(min=3, max=6), Dim.AUTO(max=5)),
    "named": (Dim("a", min=3, max=6), Dim.AUTO),
    "wider": (Dim("a", min=3, max=6), Dim.AUTO(max=9)),
}


@pytest.mark.parametrize("bounds", BOUNDED)
def test_bounds_of_free_sizes_hold(bounds: str) -> None:
    """`min=` and `max=` hold for each size, also of sizes that turn out equal, as in torch.export."""
    shapes = dict(zip("xy", ({0: dim} for dim in BOUNDED[bounds]), strict=True))
    exported = torch.export.export(Sum(), (X, Y), dynamic_shapes=shapes).module()
    program = whence.capture(Sum(), (X, Y), dynamic_shapes=shapes)
    assert admitted(program.module()) == admitted(exported)
    assert admitted(program.unflatten()) == admitted(exported)
    assert ["Dim." in line or "Dim(" in line for line in str(program.shapes).splitlines()].count(True) >= 2


def test_a_free_size_that_narrows_a_named_one_is_said() -> None:
    """A `Dim` promises every size; bounds of a size that must be equal to it leave fewer."""
    shapes = {"x": {0: Dim("a")}, "y": {0: Dim.AUTO(min=3, max=6)}}
    with pytest.raises(whence.SpecialisedShapes, match="between 3 and 6"):
        whence.capture(Sum(), (X, Y), dynamic_shapes=shapes)


class Viewed(nn.Module):
    """Gives a view of what it was given, so that a copy shows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, 2)


def test_sizes_of_one_are_taken_as_they_lie() -> None:
    """Where a size is 1, no step in memory is taken: nothing is copied, however the step is written."""
    rows = {"x": {0: Dim.AUTO}}
    program = whence.capture(Viewed(), (torch.randn(3, 4),), dynamic_shapes=rows)
    exported = torch.export.export(Viewed(), (torch.randn(3, 4),), dynamic_shapes=rows)
    for x in (torch.randn(1, 4), torch.randn(4, 1).t(), torch.randn(3, 4)[1:2]):
        for module in (program.module(), program.unflatten(), whence.unflatten(exported)):
            assert module(x).data_ptr() == x.data_ptr()
    across = torch.randn(4, 2).t()
    assert torch.equal(program.module()(across), across.reshape(2, 2, 2))


class Matrix(nn.Module):
    """A product with itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


class Convolution(nn.Module):
    """The size is that of the window's way."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.t()[None])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "matrix": Matrix,
    "convolution": Convolution,
    "view": Viewed,
}
KINDS: dict[str, Callable[[], Any]] = {
    "named": lambda: Dim("rows"),
    "bounded": lambda: Dim("rows", min=0, max=8),
    "auto": lambda: Dim.AUTO,
    "auto to 6": lambda: Dim.AUTO(min=0, max=6),
    "dynamic": lambda: Dim.DYNAMIC,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_what_torch_export_takes(model: str, kind: str) -> None:
    """For every kind of size, example and size of a run: what torch.export takes is taken, and is eager's; so
    it is in the tree of the export."""
    made: Any = MODELS[model]()
    name = "input" if model == "linear" else "x"
    for example in (0, 1, 2, 5):
        shapes, x = {name: {0: KINDS[kind]()}}, torch.randn(example, 4)
        try:
            exported = torch.export.export(made, (x,), dynamic_shapes=shapes)
        except (ValueError, RuntimeError):
            with pytest.raises((whence.CaptureError, RuntimeError)):
                whence.capture(made, (x,), dynamic_shapes=shapes)
            continue
        theirs, tree = exported.module(), whence.unflatten(exported)
        ours = whence.capture(made, (x,), dynamic_shapes=shapes).module()
        for rows in (0, 1, 2, 3, 5, 9):
            given = torch.randn(rows, 4)
            if not takes(theirs, given):
                continue
            assert torch.equal(ours(given), made(given)), (example, rows)
            assert torch.equal(tree(given), made(given)), (example, rows)


def takes(module: Callable[[Tensor], Any], given: Tensor) -> bool:
    """Whether PyTorch's program can be called with a tensor."""
    try:
        module(given)
    except (AssertionError, RuntimeError):
        return False
    return True
