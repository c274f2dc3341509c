"""Canaries: how the grad mode is set and given back."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from whence._torch.autograd.grad_modes import GradModes, observed_grad_modes


@pytest.mark.parametrize(
    ("context", "is_off"),
    [
        (torch.no_grad, True),
        (torch.enable_grad, False),
        (lambda: torch.set_grad_enabled(False), True),
        (lambda: torch.set_grad_enabled(True), False),
        (torch.inference_mode, True),
        (lambda: torch.inference_mode(False), False),
    ],
    ids=["no_grad", "enable_grad", "set off", "set on", "inference", "no inference"],
)
@pytest.mark.parametrize("outside", [torch.no_grad, torch.enable_grad])
def test_context_is_followed(
    context: Callable[[], AbstractContextManager[None]],
    is_off: bool,
    outside: Callable[[], AbstractContextManager[None]],
) -> None:
    """Inside it is what the model set last, outside nothing; whatever the mode around all is."""
    modes = GradModes()
    with outside(), observed_grad_modes(modes):
        with context():
            assert modes.is_off == is_off
            with torch.no_grad():
                assert modes.is_off
            assert modes.is_off == is_off
            with torch.set_grad_enabled(True):
                assert not modes.is_off
            assert modes.is_off == is_off
        assert modes.modes == []
        context()  # made, and perhaps entered
        torch.set_grad_enabled(False)
        assert modes.is_off
        torch.set_grad_enabled(True)
        assert not modes.is_off


def test_mode_that_was_asked_for_is_not_the_models() -> None:
    """What a model asked and sets back is not said by the model; the other one is."""
    modes = GradModes()
    with torch.enable_grad(), observed_grad_modes(modes):
        modes.given_back = True
        with torch.set_grad_enabled(True):
            assert not modes.is_on and not modes.is_off
        with torch.set_grad_enabled(False):
            assert modes.is_off
        with torch.enable_grad():
            assert modes.is_on


def test_decorated_function_is_followed() -> None:
    """A decorator enters a context in every call."""
    modes, seen = GradModes(), list[bool]()
    decorated = torch.no_grad()(lambda: seen.append(modes.is_off))
    with torch.no_grad(), observed_grad_modes(modes):
        decorated()
        decorated()
    assert (seen, modes.modes) == ([True, True], [])


def test_other_threads_are_not_followed() -> None:
    """Another thread turns gradients off unseen, and the classes are as before."""
    modes, before = GradModes(), torch.no_grad.__enter__

    def work() -> None:
        torch.set_grad_enabled(False)

    with observed_grad_modes(modes):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert modes.modes == []
    assert torch.no_grad.__enter__ is before
