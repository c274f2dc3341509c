"""Canaries: how the default generators are moved."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from whence._torch.observe.generators import (
    Kind,
    is_only_thread,
    observed_generators,
    without_default_generator,
)

HELD = torch.default_generator


class Listener:
    """Notes what it is told of torch's generators."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.states: list[object] = []

    def state_read(self, state: object) -> None:
        self.heard.append("read")
        self.states.append(state)

    def state_set(self, device: str, state: object) -> None:
        known = any(state is other for other in self.states)
        self.heard.append(f"set {device} {'back' if known else 'anew'}")

    def seed_read(self) -> None:
        self.heard.append("seed")


def unheard(_kind: Kind, _name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function of Python's or NumPy's, as it is."""
    return function(*args, **kwargs)


def told(work: Callable[[], object]) -> set[Kind]:
    """What is told of while `work` runs."""
    found: set[Kind] = set()

    def drawing(kind: Kind, _name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        found.add(kind)
        return function(*args, **kwargs)

    with observed_generators(found.add, Listener(), drawing):
        work()
    return found


def heard(work: Callable[[], object]) -> list[str]:
    """What a listener hears of torch's generators while `work` runs."""
    listener = Listener()
    with observed_generators(lambda _kind: None, listener, unheard):
        work()
    return listener.heard


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
        (fork, {"torch"}),
        (recompute, set()),
    ],
)
def test_who_moves_a_generator_is_told(work: Callable[[], object], kinds: set[Kind]) -> None:
    """Seeds, states and Python's draws are; reading, rewinding and torch's own draws are not."""
    assert told(work) == kinds


def set_back_directly() -> None:
    torch.default_generator.set_state(torch.default_generator.get_state())


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (set_back, ["read", "set cpu back"]),
        (set_back_directly, ["read", "set cpu back"]),
        (fork, ["read", "set cpu back"]),
        (recompute, []),
        (lambda: torch.manual_seed(0), ["set cpu anew"]),
        (lambda: torch.default_generator.manual_seed(0), ["set cpu anew"]),
        (lambda: torch.set_rng_state(torch.Generator().get_state()), ["set cpu anew"]),
        (torch.seed, ["set cpu anew"]),
        (torch.initial_seed, ["seed"]),
        (lambda: torch.Generator().manual_seed(0).initial_seed(), []),
        (lambda: torch.randn(2, generator=torch.default_generator), []),
    ],
)
def test_what_is_done_to_torchs_generator_is_told(work: Callable[[], object], words: list[str]) -> None:
    """States that are read and set and seeds are; a checkpoint that rewinds is not, nor another generator."""
    if torch.cuda.is_available() and work not in (set_back, set_back_directly, recompute):
        pytest.skip("they are for the device's generator, too")
    assert heard(work) == words


def test_generator_of_the_accelerator_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one, a seed is for its generator, too, which a recording leaves as it is."""

    def found(check_available: bool = False) -> torch.device:
        return torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    queued = list(torch.cuda._queued_calls)
    assert heard(lambda: torch.manual_seed(0)) == ["set cuda anew", "set cpu anew"]
    assert heard(lambda: torch.cuda.manual_seed(0)) == ["set cuda anew"]
    assert torch.cuda._queued_calls == queued


@pytest.mark.canary("torch.Generator._cdata")
def test_default_generator_is_an_operator_s_own() -> None:
    """However it is looked up it becomes None; another generator stays."""
    own = torch.Generator()
    seen: list[bool] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.bernoulli_.float:
                seen.append(without_default_generator(args, kwargs)[1]["generator"] is None)
            return func(*args, **(kwargs or {}))

    with observed_generators(lambda _kind: None, Listener(), unheard), Mode():
        for generator in (torch.default_generator, torch.random.default_generator, HELD, own):
            torch.ones(2).bernoulli_(0.5, generator=generator)
    assert seen == [True, True, True, False]


def test_other_threads_are_not_told_of() -> None:
    """Another thread seeds unseen."""

    found: list[object] = []

    def work() -> None:
        torch.manual_seed(0)
        random.seed(0)
        found.append(torch.default_generator)

    def elsewhere() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert (told(elsewhere), heard(elsewhere)) == (set(), [])
    assert found == [HELD, HELD]


def test_deprecated_names_are_still_torch_s_own() -> None:
    """Torch looks at names of its own that are deprecated, and lets no warning of that out."""
    with observed_generators(lambda _kind: None, Listener(), unheard):
        torch.overrides.get_ignored_functions.__wrapped__()


def test_modules_are_as_before() -> None:
    """`torch.random` has its `default_generator` again, and `random` its functions."""
    before = dict(vars(torch)), dict(vars(torch.random)), dict(vars(random))
    told(lambda: torch.manual_seed(0))
    assert (dict(vars(torch)), dict(vars(torch.random)), dict(vars(random))) == before
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


def test_compiler_that_looks_methods_up_is_not_the_model() -> None:
    """Dynamo makes tables of the generator's methods when it first needs them, also while a model runs."""
    table = torch._dynamo.trace_rules.load_object
    assert heard(lambda: table("torch.default_generator#initial_seed")) == []
    assert heard(lambda: int(torch.default_generator.initial_seed())) == ["seed"]
    assert table("torch.default_generator#set_state") == HELD.set_state
