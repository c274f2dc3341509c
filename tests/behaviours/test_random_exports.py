"""Whatever the modules of a model do to each other, the tree of its export computes what it computes."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

import whence
from tests.behaviours.test_random_modules import made, run
from tests.checks import differing, state
from tests.hierarchy.random_modules import IN_PLACE, Recipe, recipes
from tests.interop.helpers import exported, loaded

SEARCH = settings(
    max_examples=8,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FEW = settings(SEARCH, max_examples=6)
THOROUGH = settings(SEARCH, max_examples=300)


def forward(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """What one run from a fixed seed returns and leaves behind."""
    torch.manual_seed(1)
    with torch.no_grad():
        leaves = tree_leaves(module(x.detach()))
    return {f"output {at}": leaf for at, leaf in enumerate(leaves)} | state(module)


def exported_or_rejected(model: nn.Module, x: Tensor, way: str) -> ExportedProgram:
    """The exported program; PyTorch 2.13 cannot decompose some, for want of a graph in its own pipeline."""
    try:
        return exported(deepcopy(model), (x.detach(),), way=way)
    except AssertionError as error:
        if way == "decomposed" and "expected compiled_fn" in str(error):
            reject()
        raise


def check(recipe: Recipe, way: str) -> None:
    """The tree has eager's loss, gradients and state, bit for bit.

    Not every operation that `run_decompositions` uses has a derivative: there outputs are compared.
    """
    model, x = made(recipe)
    tree = whence.unflatten(exported_or_rejected(model, x, way))
    assert differing(forward(deepcopy(model), x), forward(deepcopy(tree), x)) == []
    if way != "decomposed":
        assert differing(run(model, x, returns_loss=False), run(tree, x, returns_loss=False)) == []


def check_writes(recipe: Recipe, way: str) -> None:
    """Arguments, rows of them and buffers that modules write in place hold eager's values afterwards."""
    model, x = made(recipe)
    given, expected = x.detach().clone(), x.detach().clone()
    tree = whence.unflatten(exported_or_rejected(model, x, way))
    assert differing(forward(deepcopy(model), expected), forward(tree, given)) == []
    assert torch.equal(expected, given)


def check_way_out(recipe: Recipe) -> None:
    """A captured program goes out, to a file, and comes back."""
    model, x = made(recipe)
    program = whence.capture(deepcopy(model), (x.detach(),)).to_exported_program()
    tree = whence.unflatten(loaded(program))
    assert differing(forward(model, x), forward(tree, x)) == []


WAYS = pytest.mark.parametrize("way", ["non-strict", "decomposed"])


@pytest.mark.sample(1)
@WAYS
@SEARCH
@given(recipe=recipes("checkpoint"))
def test_random_tree_is_eager(way: str, recipe: Recipe) -> None:
    """The tree of a random exported model is eager's."""
    check(recipe, way)


@SEARCH
@given(recipe=recipes("checkpoint"))
def test_random_program_goes_out_and_comes_back(recipe: Recipe) -> None:
    """A random captured program becomes an exported one and is the same when it is read."""
    check_way_out(recipe)


@pytest.mark.sample(1)
@WAYS
@FEW
@given(recipe=recipes("checkpoint", more=IN_PLACE))
def test_random_writes_are_eagers(way: str, recipe: Recipe) -> None:
    """The same for writes to what modules were given, to buffers through views, and to each other's."""
    check_writes(recipe, way)


@pytest.mark.slow
@WAYS
@THOROUGH
@given(recipe=recipes("checkpoint", more=IN_PLACE))
def test_many_random_writes_are_eagers(way: str, recipe: Recipe) -> None:
    """The same for many."""
    check_writes(recipe, way)


@pytest.mark.slow
@WAYS
@THOROUGH
@given(recipe=recipes("checkpoint"))
def test_many_random_trees_are_eager(way: str, recipe: Recipe) -> None:
    """The same for many."""
    check(recipe, way)
