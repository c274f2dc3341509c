"""`whence.bisect` finds the pass that makes a program compute something else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.export import Dim

import whence
from tests.checks import Backward
from tests.program.small import sine_loss
from whence.rewriting import CommonSubexpressions, DeadCode

X = torch.linspace(-1, 1, 12).reshape(3, 4)
aten = torch.ops.aten


def program(backward: Backward = sine_loss) -> whence.Program:
    torch.manual_seed(0)
    return whence.capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)), (X,), backward=backward)


def nothing(module: fx.GraphModule) -> None:
    """Changes nothing."""


def sine(module: fx.GraphModule) -> None:
    """Computes another function, and with it all that comes after."""
    for node in module.graph.find_nodes(op="call_function", target=aten.tanh.default):
        node.target = aten.sin.default


def broken(module: fx.GraphModule) -> None:
    """Changes the gradient alone."""
    for node in module.graph.find_nodes(op="call_function", target=aten.tanh_backward.default):
        node.target = aten.mul.Tensor


@pytest.mark.parametrize("position", range(6))
def test_the_pass_that_changes_bits_is_found(position: int) -> None:
    """Wherever it is; with the outputs that differ, the first operation, and the programs around it."""
    passes: list[Any] = [DeadCode(), nothing, CommonSubexpressions(), nothing, DeadCode()]
    passes.insert(position, sine)
    found = whence.bisect(program(), passes, (X,))
    assert found is not None
    assert (found.name, found.position) == ("sine", position)
    assert set(found.outputs) >= {"loss", "output"}
    assert found.first is not None and found.first.node == "tanh"
    assert len(found.after.history) == len(found.before.history) + 1 == position + 1
    assert str(found).startswith(f"pass {position}, sine, changes loss, output, ")


def test_a_change_of_gradients_alone() -> None:
    """The outputs that differ are gradients, and the operation is one of the backward."""
    found = whence.bisect(program(), [nothing, broken], (X,))
    assert found is not None and found.first is not None
    assert found.name == "broken" and all(name.startswith("grad_") for name in found.outputs)
    assert found.first.origin.phase == "backward"


def test_none_where_every_bit_is_kept() -> None:
    """Random numbers are the same in every run, and the generator is as it was."""
    before = torch.get_rng_state()
    assert whence.bisect(program(), [nothing, DeadCode(), CommonSubexpressions()], (X,)) is None
    assert whence.bisect(program(), [], (X,)) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_forward_program_and_given_inputs() -> None:
    """A forward alone, and a joint program with a tangent of one's own."""
    found = whence.bisect(program(backward=False), [nothing, sine], (X,))
    assert found is not None and found.outputs == ("output",)
    tangent = {"tangent_0": torch.full((3, 4), 2.0)}
    assert whence.bisect(program(backward=True), [nothing, broken], (X,), inputs=tangent) is not None


class Drawing(nn.Module):
    """Draws a number from Python's generator, and one from NumPy's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * random.random() * float(np.random.rand())


def test_numbers_of_other_generators_are_drawn_again() -> None:
    """Python's and NumPy's are, in all runs, where they were before."""
    drawing = whence.capture(Drawing(), (X,), decide="example")
    before = random.getstate(), str(np.random.get_state())
    assert whence.bisect(drawing, [nothing, DeadCode()], (X,)) is None
    found = whence.bisect(drawing, [nothing, sine], (X,))
    assert found is not None and found.first is not None and found.first.node == "tanh"
    assert (random.getstate(), str(np.random.get_state())) == before
    assert drawing.first((X,), differs_from=drawing.apply(nothing)) is None


class Single(nn.Module):
    """One row has a way of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 2 if x.shape[0] == 1 else x.tanh()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_variant_that_admits_the_arguments_is_run(rows: int) -> None:
    """Passes go over all of them."""
    found = whence.capture(Single(), (X,), dynamic_shapes=({0: Dim("rows")},), variants=True)
    culprit = whence.bisect(found, [nothing, sine, nothing], (X[:rows],))
    assert culprit is not None and (culprit.name, culprit.position) == ("sine", 1)
    assert culprit.first is not None and culprit.first.node == "tanh"
    assert whence.bisect(found, [nothing, nothing], (X[:rows],)) is None


def _has_no(operator: Any) -> Callable[[whence.Program], bool]:
    return lambda each: not each.graph.find_nodes(op="call_function", target=operator)


def test_a_check_of_ones_own() -> None:
    """It is asked in the place of a run, and as seldom as halving allows."""
    asked = []

    def check(each: whence.Program) -> bool:
        asked.append(each)
        return _has_no(aten.mul.Tensor)(each)

    passes = [nothing] * 9 + [broken] + [nothing] * 6
    tanh = whence.capture(nn.Tanh(), (X.clone().requires_grad_(),), backward=True)
    found = whence.bisect(tanh, passes, check=check)
    assert found is not None and (found.name, found.position, found.first) == ("broken", 9, None)
    assert len(asked) <= 6 and str(found).endswith("changes what the check looks at")


def test_passes_are_a_list() -> None:
    """One alone is no list of one."""
    alone: Any = sine
    with pytest.raises(whence.UsageError, match="expected passes in order, got function"):
        whence.bisect(program(), alone, (X,))


def test_a_check_that_fails_at_once() -> None:
    """There is no pass to blame."""
    with pytest.raises(whence.UsageError, match="fails before any pass"):
        whence.bisect(program(), [nothing], check=lambda _: False)


def test_a_step_takes_its_optimizer() -> None:
    """Its state and rates need not be given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    culprit = whence.bisect(found, [nothing, sine], (X,), optimizer=optimizer)
    assert culprit is not None and culprit.name == "sine"
    assert whence.bisect(found, [nothing], (X,), optimizer=optimizer) is None
