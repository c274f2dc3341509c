"""Seeds and states of the random number generator, set and read while a model runs."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, default_generator, nn
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import leaves_no_trace, verified

SETS, SEED, USED = "sets the state of", "asks for the seed of", "computes with the state of"


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        drawn = F.dropout(x)
    return drawn + F.dropout(x)


def forked_at_the_end(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return F.dropout(x)


def forked_around(x: Tensor) -> Tensor:
    return torch.random.fork_rng()(F.dropout)(x)


def seeded_in_a_fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x + torch.rand(4)


def set_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    drawn = F.dropout(x)
    torch.set_rng_state(state)
    return drawn + F.dropout(x)


def set_back_and_forth(x: Tensor) -> Tensor:
    state = torch.random.get_rng_state()
    drawn, after = F.dropout(x), torch.random.get_rng_state()
    torch.random.set_rng_state(state)
    again = F.dropout(x)
    torch.random.set_rng_state(after)
    return drawn + again


def set_back_directly(x: Tensor) -> Tensor:
    state = torch.default_generator.get_state()
    drawn = F.dropout(x)
    torch.default_generator.set_state(state)
    return drawn


def forked_in_a_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(forked, x, use_reentrant=False)


def in_a_branch(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    drawn: Tensor = torch.cond(x.sum() > 0, F.dropout, torch.sin, (x,))
    torch.set_rng_state(state)
    return drawn


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x + 1


def copied(x: Tensor) -> Tensor:
    state = torch.get_rng_state().clone()
    torch.set_rng_state(state)
    return x


def set_back_by_a_name_of_its_own(x: Tensor) -> Tensor:
    state = default_generator.get_state()
    drawn = torch.randn(4)
    default_generator.set_state(state)
    return x + drawn


class Holding(nn.Module):
    """Has torch's generator as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = default_generator

    def forward(self, x: Tensor) -> Tensor:
        """Draw, and give the state back."""
        state = self.generator.get_state()
        drawn = F.dropout(x)
        self.generator.set_state(state)
        return drawn


HELD = [default_generator]


def set_back_in_a_list(x: Tensor) -> Tensor:
    state = HELD[0].get_state()
    drawn = F.dropout(x)
    HELD[0].set_state(state)
    return drawn


def set_back_by_default(x: Tensor, generator: torch.Generator = default_generator) -> Tensor:
    state = generator.get_state()
    drawn = F.dropout(x)
    generator.set_state(state)
    return drawn


def seeded_in_a_closure() -> Callable[[Tensor], Tensor]:
    generator = default_generator

    def function(x: Tensor) -> Tensor:
        generator.manual_seed(3)
        return F.dropout(x)

    return function


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    **{
        function.__name__: (function, SETS)
        for function in (
            *(forked, forked_at_the_end, forked_around, seeded_in_a_fork, set_back, set_back_and_forth),
            *(set_back_directly, forked_in_a_checkpoint, in_a_branch, seeded),
            *(set_back_by_a_name_of_its_own, set_back_in_a_list, set_back_by_default),
        )
    },
    "in_an_attribute": (Holding(), SETS),
    "in_a_closure": (seeded_in_a_closure(), SETS),
    "random_seed": (lambda x: x + torch.seed() % 2, SETS),
    "seed": (lambda x: x + torch.initial_seed() % 7, SEED),
    "seed_of_the_default": (lambda x: x + torch.default_generator.initial_seed() % 7, SEED),
    "state_as_numbers": (lambda x: x + torch.get_rng_state()[:4], USED),
    "copied_state": (copied, USED),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("backward", [False, True])
def test_state_that_eager_would_have_elsewhere_is_refused(name: str, backward: bool) -> None:
    """The error names the line, and the generator is where it was, also for a state equal to the first."""
    function, what = REFUSED[name]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with leaves_no_trace(), pytest.raises(whence.SideEffect, match=what) as caught:
        whence.capture(function, (torch.ones(4, requires_grad=True),), backward=backward)
    assert "test_random_states.py" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def forked_without_a_draw(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        doubled = x * 2
    return F.dropout(doubled)


def given_back_at_once(x: Tensor) -> Tensor:
    drawn = F.dropout(x)
    torch.set_rng_state(torch.get_rng_state())
    return F.dropout(drawn)


def checkpointed(x: Tensor) -> Tensor:
    return F.dropout(checkpoint(F.dropout, x.sin(), use_reentrant=False))


def drawn_from_the_default(x: Tensor) -> Tensor:
    return x + torch.rand(4, generator=torch.default_generator).bernoulli_(generator=torch.default_generator)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "function", [*(forked_without_a_draw, given_back_at_once, checkpointed), drawn_from_the_default]
)
@pytest.mark.parametrize("backward", [False, True])
def test_state_that_is_where_it_would_be(function: Callable[[Tensor], Tensor], backward: bool) -> None:
    """The program gives eager's numbers and leaves the generator where eager does."""
    x = torch.ones(4, requires_grad=True)
    program = verified(function, x, backward=backward)
    tree = program.unflatten()
    torch.manual_seed(1)
    expected = function(x), torch.get_rng_state()
    torch.manual_seed(1)
    found = tree(x), torch.get_rng_state()
    assert all(map(torch.equal, expected, found))


def test_the_generator_has_its_name_again() -> None:
    """A file that has torch's default generator under a name of its own has it after a capture, and draws."""

    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn(4, generator=default_generator)

    verified(noisy, torch.ones(4))
    assert default_generator is torch.default_generator
    verified(noisy, torch.ones(4))


def test_numbers_that_another_thread_draws_meanwhile() -> None:
    """They are nothing that the model does, also where the example's values are drawn to decide."""
    wanted: SimpleQueue[bool] = SimpleQueue()
    drawn: SimpleQueue[Tensor] = SimpleQueue()

    def draw() -> None:
        while wanted.get():
            drawn.put(torch.rand(()))

    def decides(x: Tensor) -> Tensor:
        drops = F.dropout(x)
        result = drops if drops.sum() >= 0 else -drops
        wanted.put(True)
        drawn.get()
        return result

    thread = Thread(target=draw)
    thread.start()
    try:
        program = whence.capture(decides, (torch.ones(4),), decide="example")
    finally:
        wanted.put(False)
        thread.join()
    assert len(program.decisions) == 1
