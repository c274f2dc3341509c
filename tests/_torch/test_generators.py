"""Canaries: how the default generators are moved."""

import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from whence._torch.generators import Kind, is_only_thread, observed_generators


def told(work: Callable[[], object]) -> set[Kind]:
    """What is told of while `work` runs."""
    found: set[Kind] = set()
    with observed_generators(found.add):
        work()
    return found


def set_back() -> None:
    torch.set_rng_state(torch.get_rng_state())


def fork() -> None:
    with torch.random.fork_rng():
        torch.ones(2)


def recompute() -> None:
    result = checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False)
    result.sum().backward()


@pytest.mark.parametrize(
    ("work", "kinds"),
    [
        (lambda: torch.manual_seed(0), {"torch"}),
        (torch.seed, {"torch"}),
        (set_back, {"torch"}),
        (random.random, set()),
        (lambda: random.random(), {"python"}),  # noqa: PLW0108 - looked up inside
        (lambda: random.choice([1, 2]), {"python"}),
        (lambda: random.seed(0), {"python"}),
        (lambda: random.setstate(random.getstate()), {"python"}),
        (random.getstate, set()),
        (torch.get_rng_state, set()),
        (torch.initial_seed, set()),
        (lambda: torch.ones(2).bernoulli(), set()),
        (fork, set()),
        (recompute, set()),
    ],
)
def test_who_moves_a_generator_is_told(work: Callable[[], object], kinds: set[Kind]) -> None:
    """Seeds, states and Python's draws are; reading, rewinding and torch's own draws are not."""
    assert told(work) == kinds


def test_other_threads_are_not_told_of() -> None:
    """Another thread seeds unseen."""

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: (torch.manual_seed(0), random.seed(0)))
        thread.start()
        thread.join()

    assert told(elsewhere) == set()


def test_modules_are_as_before() -> None:
    """`torch.random` has its `default_generator` again, and `random` its functions."""
    before = dict(vars(torch.random)), dict(vars(random))
    told(lambda: torch.manual_seed(0))
    assert (dict(vars(torch.random)), dict(vars(random))) == before
    assert torch.random.default_generator is torch.default_generator


def test_other_threads_are_counted() -> None:
    """A thread that runs is noticed, however it was started (`sys._current_frames`)."""
    begun, end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    assert not is_only_thread()
    end.set()
    thread.join()
