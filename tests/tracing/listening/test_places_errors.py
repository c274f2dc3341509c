"""A model that fails by itself keeps its own error, with a note."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.tracing.failing import NESTED, OWN_ERRORS, Doing, Failing, Failure, OwnError, linear

X = torch.ones(2, 4)


@pytest.mark.parametrize("failure", OWN_ERRORS, ids=lambda failure: failure.name)
def test_own_error_survives_with_a_note(failure: Failure) -> None:
    """The error is the model's own class, and a note says that a capture was running."""
    with pytest.raises(failure.error) as caught:
        failure.capture(failure.model())
    assert not isinstance(caught.value, whence.WhenceError)
    assert any("whence was capturing" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("mode", [False, True])
def test_operation_that_fake_tensors_cannot_do(mode: bool) -> None:
    """Where PyTorch's machinery fails, and not the model, the error is ours, with line and cause."""

    def body(m: Doing, x: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor([m.linear(x), x]).to_padded_tensor(0.0)

    with pytest.raises(whence.UnsupportedOperator, match="_nested_tensor_from_tensor_list") as caught:
        whence.capture(Doing(body), (X,), backward=mode)
    assert "<locals>.body" in str(caught.value.where)
    assert caught.value.__cause__ is not None


def note(failure: Failure) -> str:
    with pytest.raises(failure.error) as caught:
        failure.capture(failure.model())
    return "".join(caught.value.__notes__)


def test_note_names_module_and_line() -> None:
    """The note names the model, the path of the module that failed and the user's line."""
    found = note(Failure("", Failing, OwnError))
    assert "capturing Failing" in found
    assert "in module layers.1" in found
    assert "failing.py" in found


def test_note_names_the_user_s_line_below_a_context_manager() -> None:
    """Where the standard library raises for the model's context manager, the line is still the model's."""

    @contextmanager
    def never() -> Iterator[None]:
        if X.dim() == 3:
            yield

    def body(m: Doing, x: Tensor) -> Tensor:
        with never():
            return m.linear(x)

    with pytest.raises(RuntimeError, match="didn't yield") as caught:
        whence.capture(Doing(body), (X,))
    assert "<locals>.body" in caught.value.__notes__[0]


def test_note_is_added_once() -> None:
    """An error that passes through several modules carries one note."""
    with pytest.raises(OwnError) as caught:
        whence.capture(Failing(), (X,))
    assert len(caught.value.__notes__) == 1


def test_note_of_a_loss_names_no_module() -> None:
    """An error in the loss function is said to be the loss function's, in no module."""
    failure = next(f for f in OWN_ERRORS if f.name == "loss raises")
    assert "the loss function" in note(failure)
    assert "in module" not in note(failure)


def test_swallowed_error_is_no_failure() -> None:
    """A model that catches its own submodule's error is captured as it went on."""

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.broken = Failing()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.broken(x)
            except OwnError:
                return self.layer(x)

    model = Trying()
    program = whence.capture(model, (X,), backward=True)
    assert program.select("layer")
    assert program.verify(model, (X,)).ok


@pytest.mark.parametrize("failure", NESTED, ids=lambda failure: failure.name)
def test_capture_inside_a_capture(failure: Failure) -> None:
    """A model or loss that captures while it is captured is told so."""
    with pytest.raises(whence.NestedCapture, match="inside a capture"):
        failure.capture(failure.model())


def test_capture_works_after_one_that_failed() -> None:
    """A failed capture does not stand in the way of the next."""
    model = Failing()
    with pytest.raises(OwnError):
        whence.capture(model, (X,))
    good = Doing(linear)
    assert whence.capture(good, (X,), backward=True).verify(good, (X,)).ok
