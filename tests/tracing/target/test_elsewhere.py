"""A capture for another device runs copies: what was given is as it was."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from whence.errors import UnsupportedOperator, UsageError

X = torch.randn(2, 4)


class Tied(nn.Module):
    """One weight in two places, a buffer, a constant that `.to` does not move, and a hook."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(()))
        self.scale = torch.tensor(2.0)
        self.first.register_forward_hook(lambda _module, _args, result: result * 2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.second(self.first(x)) * self.scale


class Failing(Tied):
    """Fails behind a write."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ZeroDivisionError


def held(model: nn.Module) -> list[tuple[int, str, Any, Any]]:
    """Every tensor of a model by identity, with what may change of it."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(id(tensor), str(tensor.device), tensor.tolist(), tensor.grad) for tensor in tensors]


@pytest.mark.parametrize("backward", [False, True])
def test_the_model_is_untouched(backward: bool) -> None:
    """Tensors, devices, ties, gradients, attributes."""
    model = Tied()
    before, attributes = held(model), dict(vars(model))
    program = whence.capture(model, (X,), device="cuda", backward=backward)
    assert held(model) == before
    assert vars(model) == attributes
    assert X.device.type == "cpu"
    assert program.input("first.weight").aliases == ("second.weight",)
    assert program.device == "cuda:0"


def test_a_capture_that_fails_leaves_it_as_it_was() -> None:
    """The copies are what was written to."""
    model = Failing()
    before = held(model)
    with pytest.raises(ZeroDivisionError):
        whence.capture(model, (X,), device="cuda")
    assert held(model) == before
    assert whence.capture(Tied(), (X,)).verify(Tied(), (X,)) is not None


def test_constants_stay_where_they_are() -> None:
    """`.to` moves parameters and buffers alone."""
    program = whence.capture(Tied(), (X,), device="cuda")
    assert program.input("scale").value.device.type == "cpu"
    assert program.input("count").value.device.type == "cuda"


def test_methods_are_captured_too() -> None:
    """A bound method is that of the copy."""
    model = Tied()
    assert whence.capture(model.forward, (X,), device="cuda").device == "cuda:0"


def test_a_model_on_meta_needs_no_memory() -> None:
    """Neither do its inputs."""
    model = Tied().to("meta")
    program = whence.capture(model, (X.to("meta"),), device="cuda:sm90", backward=True)
    assert program.device == "cuda:0:sm90"
    assert program.input("first.weight").value.device.type == "cuda"


class Locked(nn.Linear):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.lock = threading.Lock()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an unknown device": (lambda: whence.capture(Tied(), (X,), device="gpu"), "device cannot be 'gpu'"),
    "a capability without rules": (
        lambda: whence.capture(Tied(), (X,), device="cuda:sm70"),
        "use 'cuda', 'cuda:1', or with what it is capable of 'cuda:sm80', 'cuda:sm90'",
    ),
    "a function": (lambda: whence.capture(lambda x: x + 1, (X,), device="cuda"), "is no module"),
    "values of the example": (
        lambda: whence.capture(Tied(), (X,), device="cuda", decide="example"),
        "device does not work with decide='example'",
    ),
    "the bytecode front end": (
        lambda: whence.capture(Tied(), (X,), device="cuda", strict=True),
        "device does not work with strict=True",
    ),
    "what cannot be copied": (lambda: whence.capture(Locked(), (X,), device="cuda"), "cannot be copied"),
    "sparse inputs": (
        lambda: whence.capture(Tied(), (torch.eye(4).to_sparse(),), device="cuda"),
        "an input is a Tensor",
    ),
    "a lazy model": (lambda: whence.capture(nn.LazyLinear(4), (X,), device="cuda"), "UninitializedParameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said(name: str) -> None:
    """With reason and remedy, before anything runs."""
    attempt, words = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        attempt()
    assert words in str(caught.value)


class Further(nn.Module):
    """Goes to a second device."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to("cuda:1") + 1


class Recurrent(nn.Module):
    """Casts a recurrent network's weights into a buffer of cuDNN's."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            results: Tensor = self.steps(x)[0]
            return results


@pytest.mark.parametrize(
    ("model", "words"), [(Further(), "something on cuda:1"), (Recurrent(), "lstm under autocast")]
)
def test_what_is_not_known_there_is_refused(model: nn.Module, words: str) -> None:
    """Naming the line."""
    with pytest.raises(UnsupportedOperator) as caught:
        whence.capture(model, (X,), device="cuda")
    assert words in str(caught.value)


class Stuck(nn.Module):
    """Holds a tensor that does not move along."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def test_a_tensor_that_stays_behind_is_named_as_one() -> None:
    """What the device would say is said, and not that fake tensors are to blame."""
    with pytest.raises(UnsupportedOperator, match="tensors on two devices meet") as caught:
        whence.capture(Stuck(), (X,), device="cuda:sm90")
    assert "register as a buffer" in str(caught.value)
