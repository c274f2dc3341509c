"""What code is told that asks whether it is being compiled."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whence
from whence.errors import DataDependent

X = torch.randn(4, 3)


def compiling() -> bool:
    return torch.compiler.is_compiling()


def followed(x: Tensor) -> Tensor:
    return x * (2 if torch.compiler.is_compiling() else 3)


def looks(x: Tensor) -> Tensor:
    return x * 2 if torch.compiler.is_compiling() or x.sum() > 100 else x * 3


def one_of_two(x: Tensor) -> Tensor:
    x = x.sin() if torch.compiler.is_compiling() else x.cos()
    return looks(x)


def looks_twice(x: Tensor) -> Tensor:
    return looks(x) + (x * 5 if torch.compiler.is_compiling() or x.min() > 100 else x * 7)


def exporting(x: Tensor) -> Tensor:
    return x * 2 if torch.compiler.is_exporting() or x.sum() > 100 else x * 3


def combined(x: Tensor) -> Tensor:
    return x * 2 if torch.compiler.is_compiling() | (x.dim() > 5) else x * 3


class Steps(nn.Module):
    """One line asks, in two calls of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Asks() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


class Asks(nn.Module):
    """Looks at its values where it is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if torch.compiler.is_compiling() or bool((y > 100).any()) else y


EAGER: list[Callable[[Tensor], Tensor]] = [followed, combined]
TOLD: list[tuple[Callable[[Tensor], Tensor], list[str]]] = [
    (looks, ["looks"]),
    (one_of_two, ["looks"]),
    (looks_twice, ["looks", "looks_twice"]),
    (exporting, ["exporting"]),
]


@pytest.mark.parametrize("function", EAGER, ids=lambda function: function.__name__)
@pytest.mark.parametrize("backward", [False, True])
def test_what_eager_is_told(function: Callable[[Tensor], Tensor], backward: bool) -> None:
    """Where what then happens can be captured, the answer is eager's, and nothing is said of it."""
    x = X.clone().requires_grad_()
    program = whence.capture(function, (x,), backward=backward)
    assert program.asked == ()
    assert program.verify(function, (x,)).ok


@pytest.mark.parametrize(("function", "told"), TOLD, ids=lambda value: getattr(value, "__name__", ""))
def test_the_line_that_has_to_be_told(function: Callable[[Tensor], Tensor], told: list[str]) -> None:
    """It alone is told that it is compiled, and a warning and the program name it; eager that is told so
    has its bits."""
    with pytest.warns(whence.ToldCompiled, match=f"test_answers.py:.* in {told[0]}") as warned:
        program = whence.capture(function, (X,))
    assert [source.function for source in program.asked] == told
    assert [warning.filename for warning in warned] == [__file__]
    result = program.verify(function, (X,))
    assert result.explained and not result.ok
    assert torch.equal(program.module()(X.clone()), _told(function, told))


def _told(function: Callable[[Tensor], Tensor], told: list[str]) -> Tensor:
    x = X.cos() if function is one_of_two else X
    return x * 2 + (X * 5 if "looks_twice" in told else 0)


def test_equal_calls_are_told_alike() -> None:
    """One attempt more is enough for all calls of a line."""
    program = whence.capture(Steps(), (X,))
    assert [source.function for source in program.asked] == ["Asks.forward"]
    assert len(program.select(":: aten.mul")) == 3


def test_open_sizes_are_told_the_same() -> None:
    """Captures again with other sizes begin with the answers of the first."""
    program = whence.capture(looks, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert [source.function for source in program.asked] == ["looks"]
    assert torch.equal(program.module()(X[:1]), X[:1] * 2)


def test_what_no_answer_helps_is_refused() -> None:
    """The error is that of the model which is told yes everywhere, and a note says that it was told."""

    def refused(x: Tensor) -> Tensor:
        y = x * 2 if torch.compiler.is_compiling() else x
        return y if x.sum() > 0 else x

    with pytest.raises(DataDependent, match="a branch"):
        whence.capture(refused, (X,))

    def broken(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise KeyError("compiled")
        return x if x.sum() > 0 else -x

    with pytest.raises(KeyError, match="compiled") as caught:
        whence.capture(broken, (X,))
    assert any("told so" in note for note in caught.value.__notes__)
    assert any("with eager's answers" in note and "a branch" in note for note in caught.value.__notes__)


class Opaque:
    """No container."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def returns_what_nobody_registered(x: Tensor) -> Opaque:
    return Opaque(x[9] if torch.compiler.is_compiling() else x)


def test_a_class_that_is_unknown_whatever_is_told() -> None:
    """Where compiled code fails in a way of its own, that does not hide the reason."""
    with pytest.raises(whence.UnsupportedInput, match="returned a Opaque"):
        whence.capture(returns_what_nobody_registered, (X,))


def test_answers_in_a_step() -> None:
    """A step that asks is followed as a model is."""
    model = Asks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = followed(model(x)).sum()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.warns(whence.ToldCompiled, match=r"Asks\.forward"):
        program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    assert [source.function for source in program.asked] == ["Asks.forward"]
    assert program.verify(model, (X,)).explained
