"""Whatever order a pass leaves, and whatever it merges, program and tree compute what the model computes."""

import random
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import whence
from tests.behaviours.test_random_modules import SEARCH, made, run, total
from tests.checks import differing
from tests.hierarchy.random_modules import Recipe, recipes
from tests.rewriting.test_track import merge_equal
from whence._torch.operators.schemas import draws
from whence.schema import Phase


def shuffle(edit: whence.Edit, seed: int) -> None:
    """Another order of the operations that respects what they read; random numbers are drawn in turn."""
    choose, placed = random.Random(seed), set[fx.Node]()
    nodes = list(edit.graph.nodes)
    last = nodes[-1]
    waiting = [node for node in nodes if node.op == "call_function"]
    placed |= {node for node in nodes if node.op in ("placeholder", "get_attr")}
    drawing = [node for node in waiting if draws(node.target, node.args, node.kwargs)]
    while waiting:
        ready = [node for node in waiting if placed.issuperset(node.all_input_nodes)]
        ready = [node for node in ready if node not in drawing or node is drawing[0]]
        node = choose.choice(ready)
        last.prepend(node)
        placed.add(node)
        waiting.remove(node)
        drawing = drawing[1:] if node in drawing else drawing


def check_orders(recipe: Recipe, seed: int, backward: Any) -> None:
    model, x = made(recipe)
    program = whence.capture(deepcopy(model), (x,), backward=backward)
    before = {node.name: program.where(node) for node in program.graph.nodes}
    with program.track("shuffle") as edit:
        shuffle(edit, seed)
    program = edit.program
    assert {node.name: program.where(node) for node in program.graph.nodes} == before
    with program.track("cse") as edit:
        merge_equal(edit)
    program = edit.program
    expected = run(model, x, returns_loss=False)
    for module in (program.module(copy=True), program.unflatten(copy=True)):
        found = run(module, x, returns_loss=callable(backward))
        names = [name for name in differing(expected, found) if callable(backward) or "gradient" not in name]
        assert names == []
    assert {program.where(node).phase for node in program.graph.nodes} <= {Phase.FORWARD, Phase.BACKWARD}


@pytest.mark.parametrize("backward", [False, total], ids=["forward", "loss"])
@given(recipe=recipes(), seed=st.integers(0, 100))
@pytest.mark.random
@SEARCH
def test_random_modules_in_random_orders(backward: Any, recipe: Recipe, seed: int) -> None:
    """Bit for bit, except for the gradients that autograd adds up over a graph in another order."""
    check_orders(recipe, seed, backward)
