"""Whatever the modules of a model do to each other, its program and its tree compute what it computes."""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import differing, gradients, state
from tests.hierarchy.random_modules import WIDTH, Built, Recipe, recipes
from tests.hierarchy.swap.test_preserved import newcomer

pytestmark = pytest.mark.random
SEARCH = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

FEW = settings(SEARCH, phases=(Phase.explicit, Phase.generate))


def total(outputs: Any) -> Tensor:
    return torch.stack([leaf.sin().sum() for leaf in tree_leaves(outputs)]).sum()


def made(recipe: Recipe) -> tuple[Built, Tensor]:
    torch.manual_seed(0)
    return Built(recipe), torch.randn(3, WIDTH, requires_grad=True)


def run(module: nn.Module, x: Tensor, *, returns_loss: bool) -> dict[str, Any]:
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


REFUSED = "were one module|cannot be (replaced|trained here)|does not fit|was replaced, and|has no place here"


class Through(nn.Module):
    """Returns its argument, by itself or beside another value."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.beside = beside
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))  # which a caller may borrow

    def forward(self, x: Tensor, reach: Callable[[Tensor], Tensor] | None = None) -> Any:
        hidden = (x * self.scale).sin() + x
        results = {"": x, "itself": (x, x), "before": (hidden, x), "after": (x, hidden)}
        return results.get(self.beside, (hidden, hidden))


def newcomers(model: Built, path: str) -> Iterator[nn.Module]:
    """One of the same class, and those that hand on what they are given."""
    yield newcomer(model, path)
    original = model.get_submodule(path)
    has_two = isinstance(original, Built) and any(kind == "two results" for kind, _ in original.steps)
    for beside in ("itself", "before", "after", "twice") if has_two else ("",):
        yield Through(beside)


def check_surgery(model: Built, tree: nn.Module, path: str, x: Tensor, new: nn.Module) -> None:
    """The tree and the eager model with one module put into both compute the same, or the tree refuses."""
    tree.set_submodule(path, new)
    model.set_submodule(path, deepcopy(new))
    expected = run(model, x, returns_loss=False)
    try:
        found = run(tree, x, returns_loss=False)
    except whence.WhenceError as refused:
        assert re.search(REFUSED, str(refused))
        return
    assert differing(expected, found) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "tangents"])
@settings(FEW, max_examples=15)
@given(recipe=recipes("checkpoint"))
@pytest.mark.filterwarnings("ignore:their callers' graphs hold these modules")
def test_random_tree_with_preserved_calls_is_eager(backward: bool, recipe: Recipe) -> None:
    """Row 132: with calling conventions preserved, and with other modules in place; or refused by name."""
    model, x = made(recipe)
    try:
        program = whence.capture(deepcopy(model), (x,), backward=backward, preserve_calls="part*")
    except whence.SelectionError:
        reject()  # nothing is called under such a name
    tree = program.unflatten(copy=True)
    expected = run(deepcopy(model), x, returns_loss=False)
    assert differing(expected, run(deepcopy(tree), x, returns_loss=False)) == []
    flat = {flattened.number for flattened in tree.calls[0].plan.flattened}
    for path in sorted(
        {str(program.calls.rows[number].site.path) for number in program.calls.preserved - flat}
    ):
        for new in newcomers(model, path):
            check_surgery(deepcopy(model), deepcopy(tree), path, x, new)
