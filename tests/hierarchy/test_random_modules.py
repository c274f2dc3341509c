"""Whatever the modules of a model do to each other, its program and its tree compute what it computes."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import differing, gradients, state
from tests.hierarchy.random_modules import WIDTH, Built, Recipe, recipes

SEARCH = settings(
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def total(outputs: Any) -> Tensor:
    return torch.stack([leaf.sin().sum() for leaf in tree_leaves(outputs)]).sum()


def made(recipe: Recipe) -> tuple[Built, Tensor]:
    torch.manual_seed(0)
    return Built(recipe), torch.randn(3, WIDTH, requires_grad=True)


def run(module: torch.nn.Module, x: Tensor, *, returns_loss: bool) -> dict[str, Any]:
    """The loss of one run from a fixed seed, and everything it leaves behind."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    result = module(x)
    loss = result[0] if returns_loss else total(result)
    loss.backward()
    left = {f"gradient {name}": gradient for name, gradient in gradients(module).items()}
    return {"loss": loss.detach(), "gradient x": x.grad, **left, **state(module)}


MODES = pytest.mark.parametrize("backward", [False, True, total], ids=["forward", "tangents", "loss"])


def check_program(recipe: Recipe, backward: Any) -> None:
    model, x = made(recipe)
    result = whence.capture(model, (x,), backward=backward).verify(model, (x,))
    assert result.ok, str(result)


def check_tree(recipe: Recipe, backward: Any) -> None:
    model, x = made(recipe)
    tree = whence.capture(deepcopy(model), (x,), backward=backward).unflatten()
    expected, found = run(model, x, returns_loss=False), run(tree, x, returns_loss=callable(backward))
    assert differing(expected, found) == []


@MODES
@SEARCH
@given(recipe=recipes("checkpoint"))
def test_random_program_is_eager(backward: Any, recipe: Recipe) -> None:
    """The program of a random model equals eager in outputs, gradients, buffers and generator state."""
    check_program(recipe, backward)


@MODES
@SEARCH
@given(recipe=recipes("checkpoint"))
def test_random_tree_is_eager(backward: Any, recipe: Recipe) -> None:
    """The tree of a random model has eager's loss, gradients and buffers, bit for bit."""
    check_tree(recipe, backward)


@MODES
@SEARCH
@given(recipe=recipes("count", "drop"))
def test_random_program_with_checkpoints_is_eager(backward: Any, recipe: Recipe) -> None:
    """The same with checkpoints, nested too, around modules that keep no state and draw no numbers."""
    check_program(recipe, backward)


@MODES
@SEARCH
@given(recipe=recipes("count", "drop"))
def test_random_tree_with_checkpoints_is_eager(backward: Any, recipe: Recipe) -> None:
    """The same for trees."""
    check_tree(recipe, backward)
