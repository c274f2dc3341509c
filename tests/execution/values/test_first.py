"""`program.first` names the first operation that makes what is not finite, or computes otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.models import case, logits_loss
from tests.program.small import Stack

X = torch.randn(3, 4)


class Root(nn.Module):
    """A square root, whose gradient at zero is infinite, and whose value below is none."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


def test_the_first_nan_is_named_with_its_call_and_line() -> None:
    """In the forward: later ones follow from it."""
    program = whence.capture(nn.Sequential(nn.Identity(), Root(), nn.Softmax(-1)), (X.abs(),))
    assert program.first((X.abs(),)) is None
    found = program.first((-X.abs() - 1,))
    assert found is not None
    assert str(found).startswith("sqrt holds a NaN: forward of 1, at ")
    assert found.to_dict()["calls"] == ["1"]
    assert found.origin.source is not None and found.origin.source.function == "Root.forward"


def test_the_first_infinity_of_the_backward() -> None:
    """The forward is finite, and a gradient is not."""
    model = nn.Sequential(nn.ReLU(), Root())
    program = whence.capture(model, (X.clone().requires_grad_(),), backward=lambda y: y.sum())
    found = program.first((torch.zeros(3, 4),))
    assert found is not None and found.origin.phase == "backward"
    assert [str(call) for call in found.origin.calls] == ["1"]
    assert "holds an infinity" in str(found)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_masks_are_no_accident(name: str) -> None:
    """Infinities that are written down are meant to be there, and so is what they become."""
    model, args, kwargs = case(name).make()
    assert whence.capture(model, args, kwargs, backward=logits_loss).first(args, kwargs) is None
    scores = whence.capture(lambda x: (x + torch.full((4, 4), float("-inf")).triu(1)[:3]).relu(), (X,))
    assert scores.first((X,)) is None


def test_input_that_is_none_is_named() -> None:
    """Nobody made it."""
    program = whence.capture(Stack(), (X,))
    found = program.first((torch.full((3, 4), float("nan")),))
    assert found is not None and found.node == "features"


@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
def test_first_difference_of_a_pass(joint: bool) -> None:
    """What a pass changed, and not what follows from it."""
    program = whence.capture(Stack(), (X,), backward=squares if joint else False)
    assert program.first((X,), differs_from=program) is None
    with program.track("negated") as edit:
        relu = edit.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)[1]
        relu.target = torch.ops.aten.abs.default
    found = edit.program.first((X,), differs_from=program)
    assert found is not None and found.node == relu.name and "differs by up to" in found.why
    assert [str(call) for call in found.origin.calls] == ["layers.1.mlp.1"]


def test_first_difference_of_another_shape() -> None:
    """Shapes are told before values."""
    left = whence.capture(lambda x: x.sin().sum(0), (X,))
    right = whence.capture(lambda x: x.sin().sum(1), (X,))
    found = left.first((X,), differs_from=right)
    assert found is not None and found.why == "is f32[4], and not f32[3]"


def test_dropout_draws_the_same_numbers_in_both() -> None:
    """Two runs begin with one random state."""
    program = whence.capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train(), (X,))
    assert program.first((X,), differs_from=program.decompose()) is None


def test_memory_that_nobody_has_written_is_not_compared() -> None:
    """Dropout begins with such memory, which is other numbers in every run."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    program = whence.capture(model, (torch.randn(64, 4),), backward=lambda y: y.sum())
    assert program.select(":: aten.empty_like")
    assert program.first((torch.randn(64, 4),), differs_from=program) is None


class Masked(nn.Module):
    """Adds a mask that holds an infinity to what two layers compute."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) + self.mask).softmax(-1)


@pytest.mark.parametrize(("number", "what"), [("inf", "an infinity"), ("nan", "a NaN")])
@pytest.mark.parametrize("state", ["inputs", "attributes"])
def test_a_parameter_that_is_not_finite_is_named(number: str, what: str, state: Any) -> None:
    """It is where all that follows comes from; an infinity in a buffer, a mask, is meant to be there."""
    model = Masked()
    with torch.no_grad():
        model.second.weight[0, 0] = float(number)
    found = whence.capture(model, (X,), state=state).first((X,))
    assert found is not None and found.why == f"holds {what}: it is the parameter second.weight"
    assert str(found) == f"{found.node} {found.why}"


@pytest.mark.parametrize(("number", "what"), [("inf", "an infinity"), ("nan", "a NaN")])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_state_of_an_optimizer_that_is_not_finite_is_named(number: str, what: str, key: str) -> None:
    """Also where it is divided by, and all that the step computes of it is finite."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(X)
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    assert program.first((X,), optimizer=optimizer) is None
    optimizer.state[model.weight][key][0, 0] = float(number)
    found = program.first((X,), optimizer=optimizer)
    path = f"optimizer.state['weight']['{key}']"
    assert found is not None and found.why == f"holds {what}: it is the optimizer state {path}"
