"""Calls bind as Python binds them: every way to write one, for every kind of signature, in all that runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

X, Y = torch.arange(12.0).reshape(3, 4) / 7, torch.arange(12.0).reshape(3, 4) / 3


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def scaled(self, x: Tensor, y: Tensor | None, scale: float) -> Tensor:
        hidden: Tensor = self.layer(x) * scale
        return hidden if y is None else hidden + y


class Plain(Scaling):
    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 2.0) -> Tensor:
        return self.scaled(x, y, scale)


class KeywordOnly(Scaling):
    def forward(self, x: Tensor, *, y: Tensor | None = None, scale: float = 2.0) -> Tensor:
        return self.scaled(x, y, scale)


class PositionalOnly(Scaling):
    def forward(self, x: Tensor, y: Tensor | None = None, /, scale: float = 2.0) -> Tensor:
        return self.scaled(x, y, scale)


class OpenPositional(Scaling):
    def forward(self, x: Tensor, *rest: Tensor, scale: float = 2.0) -> Tensor:
        return self.scaled(x, rest[0] if rest else None, scale)


class OpenKeyword(Scaling):
    def forward(self, x: Tensor, /, **named: Tensor) -> Tensor:
        return self.scaled(x, named.get("x"), 2.0)


def handing_on(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs)

    return inner


class Wrapped(Scaling):
    @handing_on
    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 2.0) -> Tensor:
        return self.scaled(x, y, scale)


class Containers(Scaling):
    def forward(
        self, batch: dict[str, Tensor], shape: tuple[int, ...] = (3, 4), *, options: Any = None
    ) -> Tensor:
        times = 1.0 if options is None else options["scale"]
        return self.scaled(batch["x"], batch["y"], times).reshape(shape)


class ContainerDefault(Scaling):
    def forward(self, x: Tensor, options: dict[str, float] = {"scale": 2.0}, axes: Any = [0]) -> Tensor:  # noqa: B006
        return self.scaled(x, None, options["scale"]).flip(axes)


@dataclass
class Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


BATCH = {"x": X, "y": Y}
ALIKE: list[tuple[type[nn.Module], list[Call]]] = [
    (
        Plain,
        [call(X), call(x=X), call(X, None), call(X, scale=2.0), call(X, None, 2.0), call(scale=2.0, x=X)],
    ),
    (Plain, [call(X, Y), call(X, y=Y), call(y=Y, x=X), call(X, Y, 2.0), call(X, scale=2.0, y=Y)]),
    (Plain, [call(X, None, 3.0), call(X, scale=3.0), call(scale=3.0, x=X, y=None)]),
    (KeywordOnly, [call(X, y=Y), call(x=X, y=Y), call(y=Y, x=X, scale=2.0)]),
    (PositionalOnly, [call(X, Y), call(X, Y, 2.0), call(X, Y, scale=2.0)]),
    (OpenPositional, [call(X, Y), call(X, Y, scale=2.0)]),
    (OpenPositional, [call(X), call(x=X), call(scale=2.0, x=X)]),
    (OpenKeyword, [call(X, x=Y)]),
    (Wrapped, [call(X, Y), call(X, y=Y), call(y=Y, x=X), call(X, Y, 2.0)]),
    (Containers, [call(BATCH), call(batch=BATCH), call(BATCH, (3, 4)), call(shape=(3, 4), batch=BATCH)]),
    (Containers, [call(BATCH, options={"scale": 3.0}), call(options={"scale": 3.0}, batch=BATCH)]),
    (
        ContainerDefault,
        [call(X), call(x=X), call(X, {"scale": 2.0}), call(X, axes=[0]), call(X, {"scale": 2.0}, [0])],
    ),
]
"""Signatures, and ways to write one call of each."""

DIFFERENT: list[tuple[type[nn.Module], Call, Call, str]] = [
    (Plain, call(X), call(X, Y), "y was left out at capture, where it is None, and is f32[3, 4] now"),
    (Plain, call(X), call(X, scale=3.0), "scale was left out at capture, where it is 2.0, and is 3.0 now"),
    (Plain, call(x=X), call(X, None, 2), "scale was left out at capture, where it is 2.0, and is 2 now"),
    (Plain, call(X, Y), call(X), "args[1] was a tensor f32[3, 4] at capture, is None"),
    (Plain, call(X, scale=3.0), call(X), "kwargs['scale'] was 3.0 at capture, is 2.0"),
    (Plain, call(X, Y), call(Y), "args[1] was a tensor"),
    (Plain, call(X), call(X, x=X), "multiple values for argument 'x'"),
    (Plain, call(X), call(X, z=X), "got an unexpected keyword argument 'z'"),
    (Plain, call(X), call(), "missing a required argument: 'x'"),
    (KeywordOnly, call(X, y=Y), call(X, Y), "too many positional arguments"),
    (PositionalOnly, call(X, Y), call(X, y=Y), "got an unexpected keyword argument 'y'"),
    (OpenPositional, call(X), call(X, Y), "another structure"),
    (OpenPositional, call(X, Y), call(X), "another structure"),
    (OpenKeyword, call(X, x=Y), call(X, y=Y), "another structure"),
    (OpenKeyword, call(X), call(X, x=Y), "another structure"),
    (Containers, call(BATCH), call(BATCH, (4, 3)), "shape was left out at capture, where it is (3, 4)"),
    (Containers, call(BATCH), call(BATCH, options={"scale": 3.0}), "options was left out at capture"),
    (Containers, call(BATCH, options={"scale": 3.0}), call(BATCH), "another structure"),
    (ContainerDefault, call(X), call(X, {"scale": 3.0}), "options was left out at capture"),
]
"""Signatures, a captured call, another one, and what is said of it."""


def runs(
    program: whence.Program, model: nn.Module, captured: Call, *, compiled: bool
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """All that runs a capture of this call."""
    yield "module", program.module()
    yield "tree", program.unflatten()
    yield "onto", program.unflatten(onto=model)
    yield "guarded", program.guarded(model)
    yield "bound", program.bind(model)
    yield "child", child(model, captured)
    if compiled:
        yield "compiled", torch.compile(program.unflatten(), backend="eager", fullgraph=True)
        yield "compiled in a graph", torch.compile(program.module(), backend="eager")


def child(model: nn.Module, captured: Call) -> Callable[..., Any]:
    """The captured module as one of a tree, called alone."""

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = self.inner(*args, **kwargs) + 1
            return result

    tree: Any = whence.capture(Calling(), captured.args, captured.kwargs).unflatten()
    found: Callable[..., Any] = tree.inner
    return found


def numbered(rows: list[Any]) -> list[str]:
    return [f"{row[0].__name__}-{number}" for number, row in enumerate(rows)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "ways"), ALIKE, ids=numbered(ALIKE))
def test_a_call_is_written_in_any_way(kind: type[nn.Module], ways: list[Call]) -> None:
    """Captured as written in one way, it may be written in all others."""
    torch.manual_seed(0)
    model = kind()
    wanted = model(*ways[0].args, **ways[0].kwargs)
    is_first = next(of_kind for other, of_kind in ALIKE if other is kind) is ways  # compilers take seconds
    for number, captured in enumerate(ways):
        program = whence.capture(model, captured.args, captured.kwargs)
        for way in ways:
            assert program.check(model, way.args, way.kwargs) == []
        way = ways[number - 1]
        assert program.verify(model, way.args, way.kwargs).ok
        for name, run in runs(program, model, captured, compiled=number == 0 and is_first):
            for way in ways:
                found = run(*way.args, **way.kwargs)
                assert torch.equal(found, wanted), (name, captured, way)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "captured", "other", "words"), DIFFERENT, ids=numbered(DIFFERENT))
def test_another_call_is_refused(kind: type[nn.Module], captured: Call, other: Call, words: str) -> None:
    """The error says which argument is another one, also where it was left out at capture."""
    model = kind()
    program = whence.capture(model, captured.args, captured.kwargs)
    (violation,) = program.check(model, other.args, other.kwargs)
    assert violation.guard.what in ("the arguments", "args[1]", "kwargs['scale']")
    with pytest.raises(whence.CallError) as caught:
        program.verify(model, other.args, other.kwargs)
    assert words in str(caught.value)
    for name, run in runs(program, model, captured, compiled="left out" in words):
        if name == "guarded":
            with pytest.raises(whence.StaleCapture):
                run(*other.args, **other.kwargs)
        elif name == "compiled":
            with pytest.raises(Exception, match="do not fit"):
                run(*other.args, **other.kwargs)
        else:
            with pytest.raises(whence.CallError) as caught:
                run(*other.args, **other.kwargs)
            assert words in str(caught.value), name


@pytest.mark.parametrize("way", ["flat", "tree", "bound"])
def test_a_tensor_on_another_device_is_no_argument(way: str) -> None:
    """Eager says so only where it meets a tensor of the model's; a program of factories would say nothing."""
    model = Plain()
    program = whence.capture(model, (X,))
    runs: dict[str, Callable[[], Any]] = {
        "flat": program.module,
        "tree": program.unflatten,
        "bound": lambda: program.bind(model),
    }
    with pytest.raises(whence.CallError, match=r"args\[0\] was on cpu at capture, is on meta"):
        runs[way]()(X.to("meta"))
    assert program.check(model, (X.to("meta"),)) != []

    def on_its_device(x: Tensor) -> Tensor:
        return x + torch.ones(4, device=x.device)

    alone = whence.capture(on_its_device, (X,))
    with pytest.raises(whence.CallError, match="is on meta"):
        alone.module()(X.to("meta"))
