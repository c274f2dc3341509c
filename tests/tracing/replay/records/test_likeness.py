"""Layers that seem equal: replayed where they are, traced where they are not, and one program in any case."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import whence
from tests import models
from tests.sameness import differences, first_run
from tests.tracing.replay import layered as kinds
from tests.tracing.replay.layered import Block, Stack

MODES: dict[str, Any] = {}


def loss(outputs: Any) -> Tensor:
    return torch.stack([leaf.sin().sum() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]).sum()


MODES |= {"forward": False, "tangents": True, "loss": loss}


def blocks(kind: Callable[[], nn.Module], count: int = 4) -> list[nn.Module]:
    return [kind() for _ in range(count)]


def tied() -> nn.Module:
    stack = Stack(*blocks(Block))
    for block in stack.blocks[2:]:
        block.up.weight = stack.blocks[0].up.weight  # type: ignore[union-attr]
    return stack


def tied_inside() -> nn.Module:
    stack = Stack(*blocks(Block))
    for block in stack.blocks:
        block.norm.bias = block.down.bias  # type: ignore[union-attr]
    return stack


def sharing() -> nn.Module:
    stack = Stack(*blocks(Block))
    for block in stack.blocks:
        block.norm = stack.blocks[0].norm
    return stack


def partly_frozen() -> nn.Module:
    stack = Stack(*blocks(Block, 5))
    for block in stack.blocks[:2]:
        block.requires_grad_(False)
    return stack


def hooked() -> nn.Module:
    stack = Stack(*blocks(Block))
    stack.blocks[2].register_forward_hook(lambda _module, _args, result: result * 2)
    return stack


def hooked_inside() -> nn.Module:
    stack = Stack(*blocks(Block))
    stack.blocks[2].up.register_forward_hook(lambda _module, _args, result: result * 2)  # type: ignore[union-attr]
    return stack


def adapted() -> nn.Module:
    stack = Stack(*blocks(Block, 5))
    for block in (stack.blocks[1], stack.blocks[2]):
        block.up = kinds.Adapted(block.up)  # type: ignore[arg-type]
    return stack


def other_function() -> nn.Module:
    stack = Stack(*blocks(Block))
    inner = stack.blocks[2].forward
    stack.blocks[2].forward = lambda x: inner(x) + 1
    return stack


CASES: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "equal": (lambda: Stack(*blocks(Block)), "Block", 3),
    "a scalar that is read": (lambda: Stack(*(Block(1.0 + n // 2) for n in range(4))), "Block", 2),
    "a scalar that is not read": (lambda: Stack(*(Block(label=str(n)) for n in range(4))), "Block", 3),
    "an int for a float": (lambda: Stack(Block(1.0), Block(1), Block(1.0)), "Block", 1),
    "a negative zero": (lambda: Stack(Block(0.0), Block(-0.0), Block(0.0)), "Block", 1),
    "one module called often": (lambda: Stack(*[Block()] * 4), "Block", 2),
    "counter on self": (lambda: Stack(*blocks(kinds.CountsOnSelf)), "CountsOnSelf", 0),
    "counter on the class": (lambda: Stack(*blocks(kinds.CountsOnClass)), "CountsOnClass", 0),
    "counter in a global": (lambda: Stack(*blocks(kinds.CountsInGlobal)), "CountsInGlobal", 0),
    "counter in a dict": (lambda: Stack(*blocks(kinds.CountsInDict)), "CountsInDict", 0),
    "counter in a closure": (lambda: Stack(*blocks(kinds.CountsInClosure)), "CountsInClosure", 0),
    "a context variable": (lambda: Stack(*blocks(kinds.ReadsContext)), "ReadsContext", 3),
    "a list passed along": (lambda: kinds.CollectingStack(*blocks(kinds.Collects)), "Collects", 0),
    "a cache passed along": (lambda: kinds.CachingStack(*blocks(kinds.Caches)), "Caches", 0),
    "a view returned": (lambda: kinds.ViewingStack(*blocks(kinds.Views)), "Views", 0),
    "an argument written": (lambda: Stack(nn.Softplus(), *blocks(kinds.WritesArgument)), "WritesArgument", 0),
    "a result written": (lambda: kinds.WrittenStack(*blocks(Block)), "Block", 0),
    "batch normalisation": (lambda: Stack(*blocks(kinds.Normalises)), "Normalises", 0),
    "autocast in one layer": (lambda: Stack(*(kinds.Casts(n == 2) for n in range(4))), "Casts", 2),
    "checkpoints": (lambda: kinds.Checkpoints(*blocks(Block, 6)), "Block", 2),
    "adapters on some layers": (adapted, "Block", 3),
    "numbers made": (lambda: Stack(*blocks(kinds.MakesNumbers)), "MakesNumbers", 0),
    "tied across layers": (tied, "Block", 3),
    "tied inside layers": (tied_inside, "Block", 3),
    "a shared submodule": (sharing, "Block", 3),
    "frozen layers": (partly_frozen, "Block", 3),
    "a hook on one layer": (hooked, "Block", 2),
    "a hook inside one layer": (hooked_inside, "Block", 2),
    "another forward in one layer": (other_function, "Block", 2),
    "skip connections": (lambda: kinds.Skips(*blocks(Block)), "Block", 3),
    "dense connections": (lambda: kinds.Dense(*blocks(Block)), "Block", 3),
    "one tensor given twice": (lambda: kinds.PairStack(*blocks(kinds.Pair, 6)), "Pair", 4),
    "gradients taken inside": (lambda: kinds.Differentiates(*blocks(Block)), "Block", 0),
    "hooks on gradients": (lambda: Stack(*blocks(kinds.Hooked)), "Hooked", 0),
    "dropout": (lambda: Stack(*blocks(kinds.Drops)), "Drops", 3),
    "one memory for all layers": (lambda: kinds.LookingStack(*blocks(kinds.Looks)), "Looks", 3),
    "another layout of gradients": (lambda: Stack(Block(), *blocks(kinds.Turned)), "Turned", 3),
    "results nobody uses": (lambda: kinds.UsingOne(*blocks(kinds.Twofold)), "Twofold", 3),
    "stacks of layers": (lambda: Stack(*(Stack(*blocks(Block)) for _ in range(3))), "Block", 11),
}
EVERY_CASE = pytest.mark.parametrize("name", CASES)
EVERY_MODE = pytest.mark.parametrize("mode", MODES)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = kinds.Stemmed(CASES[name][0]())
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model, torch.randn(3, 4, kinds.WIDTH)


@cache
def captured(name: str, mode: str, *, reuse: bool = True) -> whence.Program:
    """The program of a case, to be read and never to be changed."""
    kinds.COUNTS["calls"], kinds.TOTAL, kinds.CountsOnClass.calls = 0, 0, 0
    kinds.FOLLOWING = kinds.counting()
    model, x = made(name)
    return first_run(model, (x,), backward=MODES[mode], reuse=reuse)


ADDS_LATER = {"one memory for all layers"}
"""Replayed, a layer inside of a layer hands on all gradients of a value at once: the sums come after it."""


@pytest.mark.sample(6)
@EVERY_CASE
@pytest.mark.parametrize("mode", models.MODES)
def test_program_is_the_same_with_and_without_reuse(name: str, mode: str) -> None:
    """Whatever the layers do on the side, both captures see the same model do the same."""
    plain, replayed = captured(name, mode, reuse=False), captured(name, mode)
    if name in ADDS_LATER:
        first, second = (Counter(str(node.target) for node in each.nodes()) for each in (plain, replayed))
        assert first == second
        return
    assert differences(plain, replayed) == {}


DIFFERS_WITH_COUNTS = {name for name in CASES if name.startswith("counter ")}


@pytest.mark.sample(8)
@EVERY_CASE
def test_program_is_what_eager_computes(name: str) -> None:
    """Outputs, gradients and buffers, bit for bit."""
    if name in DIFFERS_WITH_COUNTS:
        pytest.skip("eager counts on from where the capture left the counter, or the capture leaves none")
    model, x = made(name)
    result = captured(name, "loss").verify(model, (x,))
    assert result.ok, str(result)


@pytest.mark.sample(12)
@EVERY_CASE
def test_what_is_equal_is_replayed(name: str) -> None:
    """As many calls as can be are replayed, and no more; there is a reason for every other but the first."""
    _, kind, expected = CASES[name]
    row = captured(name, "loss").replay[kind]
    assert row.replayed == expected, str(row)
    assert row.replayed + row.traced >= 3
    if not expected:
        assert row.reasons


def test_without_gradients() -> None:
    """Under no_grad there is nothing to differentiate, and layers are replayed as well."""
    model, x = made("equal")
    with torch.no_grad():
        plain = whence.capture(model, (x,), reuse=False)
        program = whence.capture(model, (x,), reuse=True)
    assert program.replay["Block"].replayed == 3
    assert differences(plain, program) == {}


def test_layers_dropped_at_random_are_refused() -> None:
    """Python's random numbers decide which layers run: a capture refuses that, replay or not."""

    class Dropping(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) if random.random() < 0.9 else x
            return x

    for reuse, seed in itertools.product((False, True), range(4)):
        random.seed(seed)
        with pytest.raises(whence.SideEffect, match="random"):
            whence.capture(Dropping(*blocks(Block)), (torch.ones(3, 4, kinds.WIDTH),), reuse=reuse)


def test_model_is_untouched() -> None:
    """Replayed layers hold what they held."""
    model, x = made("equal")
    before = [dict(vars(module)) for module in model.modules()]
    first_run(model, (x,), backward=loss)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_errors_in_later_layers_show_the_whole_program() -> None:
    """What had been replayed when a capture stopped is shown as what it stands for."""
    model = Stack(*blocks(Block), nn.Linear(kinds.WIDTH, 2), Block())
    with pytest.raises(RuntimeError):
        whence.capture(model, (torch.ones(3, 4, kinds.WIDTH),), reuse=True)

    class Asks(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if super().forward(x).sum() > 0 else x

    with pytest.raises(whence.DataDependent) as caught:
        whence.capture(Asks(*blocks(Block)), (torch.ones(3, 4, kinds.WIDTH),), reuse=True)
    page = str(caught.value.partial)
    assert "whence_stand_in" not in page
    assert page.count("aten.gelu.default") == 4
