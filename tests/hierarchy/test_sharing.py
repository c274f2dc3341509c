"""Equal calls share one body, and each still has what is its own."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import whence
from tests.checks import captured, differing
from tests.hierarchy.random_modules import Recipe, recipes
from tests.hierarchy.test_random_modules import SEARCH, made, run, total
from tests.models import MODEL_CASES
from whence.hierarchy import layout
from whence.hierarchy.check import check
from whence.hierarchy.plan import Body, Plan
from whence.hierarchy.planning import plan


def planned_one_by_one(program: whence.Program) -> Plan:
    """The plan in which no call shares the body of another."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(layout, "first_equal_calls", lambda regions: tuple(range(len(regions.rows))))
        return plan(program)


def contents(body: Body | None) -> tuple[Any, ...] | None:
    """A body but for the order of what crosses its border."""
    if body is None:
        return None
    return (set(body.inputs), set(body.outputs), set(body.reads), body.steps, set(body.kept))


def check_same_plan(program: whence.Program) -> None:
    """Every call is planned as it is when it is planned by itself."""
    shared, alone = plan(program), planned_one_by_one(program)
    check(shared)
    assert list(shared.calls) == list(alone.calls)
    assert shared.flattened == alone.flattened
    for number, call in alone.calls.items():
        assert contents(shared.calls[number].forward) == contents(call.forward)
        assert contents(shared.calls[number].backward) == contents(call.backward)


@pytest.mark.parametrize("mode", ["forward", "tangents", "loss"])
@pytest.mark.parametrize("name", [row.name for row in MODEL_CASES])
def test_plan_of_the_table_is_that_of_each_call_alone(name: str, mode: str) -> None:
    """For every model of the table, renaming a plan gives what planning would have given."""
    check_same_plan(captured(name, mode))


@pytest.mark.parametrize("backward", [False, True, total], ids=["forward", "tangents", "loss"])
@SEARCH
@given(recipe=recipes("count", "drop"))
def test_plan_of_random_modules_is_that_of_each_call_alone(backward: Any, recipe: Recipe) -> None:
    """The same for random modules, with checkpoints."""
    model, x = made(recipe)
    check_same_plan(whence.capture(model, (x,), backward=backward))


class Twice(nn.Module):
    """Two equal modules around each other's results, so that random modules meet copies of themselves."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        results = []
        for part in self.parts:
            result = part(x)
            x = result[0] if isinstance(result, tuple) else result
            results.append(result)
        return results


@pytest.mark.parametrize("backward", [False, True, total], ids=["forward", "tangents", "loss"])
@settings(SEARCH, max_examples=15)
@given(recipe=recipes("count", "drop"))
def test_random_layers_share_and_are_eager(backward: Any, recipe: Recipe) -> None:
    """A stack of random modules has the plan of each alone, and its tree has eager's numbers."""
    torch.manual_seed(0)
    model, x = Twice(lambda: made(recipe)[0]), torch.randn(3, 4, requires_grad=True)
    program = whence.capture(deepcopy(model), (x,), backward=backward)
    check_same_plan(program)
    expected = run(model, x, returns_loss=False)
    assert differing(expected, run(program.unflatten(), x, returns_loss=callable(backward))) == []
