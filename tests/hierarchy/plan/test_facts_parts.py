"""A call whose operations cannot be cut out of the graph stays in its caller's graph, with a reason.

No model that we know makes one, so the origins of a sound program are changed: the third of three layers is
said to belong to the first, so that a value leaves the first call and comes back.
"""

import pytest
import torch
from torch import nn

import whence
from tests.checks import same_bits
from tests.program.small import sine_loss
from whence import Phase
from whence.hierarchy.plan.check import check
from whence.hierarchy.plan.planning import plan
from whence.program.node_records import origin_of, set_origin

X = torch.randn(3, 4)


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid())


def with_the_last_given_to_the_first(model: nn.Module, phase: Phase, *, joint: bool) -> whence.Program:
    program = whence.capture(model, (X,), backward=sine_loss if joint else False)
    (owner,) = {origin_of(node).place for node in program.select(f"0 :: :: {phase}")}
    assert owner is not None
    for node in program.select(f"2 :: :: {phase}"):
        set_origin(node, origin_of(node)._replace(calls=(owner,), place=owner))
    return program


@pytest.fixture
def model() -> nn.Module:
    return chain()


def test_region_that_is_left_and_entered_again_is_flattened(model: nn.Module) -> None:
    """The calls on the circle are flattened, and the reason names them and the phase."""
    planned = plan(with_the_last_given_to_the_first(model, Phase.FORWARD, joint=False))
    flattened = {str(planned.program.calls.rows[entry.number].site) for entry in planned.flattened}
    assert "0" in flattened
    reasons = {entry.reason for entry in planned.flattened if entry.phase is Phase.FORWARD}
    assert reasons == {"a value leaves 0, 1 in the forward and comes back before it has finished"}


def test_flattened_call_says_why_it_cannot_be_made(model: nn.Module) -> None:
    """It was called, and its operations are somewhere else: that is not a module that was never called."""
    program = with_the_last_given_to_the_first(model, Phase.FORWARD, joint=False)
    for tree in (program.unflatten(), program.unflatten(onto=model)):
        with pytest.raises(whence.CallError, match="has no graph of its own") as caught:
            tree.get_submodule("0")(X)
        assert "part of its caller's graph: a value leaves 0, 1" in caught.value.why


def test_flattened_plan_holds(model: nn.Module) -> None:
    """What remains after flattening is a sound plan."""
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        check(plan(with_the_last_given_to_the_first(model, phase, joint=True)))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_flattened_tree_has_the_same_numbers(model: nn.Module, phase: Phase) -> None:
    """A tree with flattened calls computes what the model computes, gradients too."""
    tree = with_the_last_given_to_the_first(model, phase, joint=True).unflatten(copy=True)
    loss, output = tree(X)
    loss.backward()
    expected = model(X)
    sine_loss(expected).backward()
    assert same_bits(output, expected)
    for ours, theirs in zip(tree.parameters(), model.parameters(), strict=True):
        assert same_bits(ours.grad, theirs.grad)


def test_flattened_module_cannot_be_called_alone(model: nn.Module) -> None:
    """A module whose forward is part of its caller's graph says so when it is called."""
    tree = with_the_last_given_to_the_first(model, Phase.FORWARD, joint=False).unflatten()
    with pytest.raises(whence.CallError, match="part of its caller's graph"):
        tree.get_submodule("0")(X)


def test_module_with_a_flattened_backward_cannot_be_differentiated_alone(model: nn.Module) -> None:
    """A module whose backward is part of its caller's graph runs, and refuses to be differentiated."""
    tree = with_the_last_given_to_the_first(model, Phase.BACKWARD, joint=True).unflatten()
    output = tree.get_submodule("0")(X)
    with pytest.raises(whence.NotDifferentiable, match="part of its caller's"):
        output.sum().backward()


def test_state_stays_where_it_was(model: nn.Module) -> None:
    """A flattened module keeps its parameters and their names."""
    tree = with_the_last_given_to_the_first(model, Phase.FORWARD, joint=False).unflatten()
    assert [name for name, _ in tree.named_parameters()] == ["0.weight", "0.bias"]


def test_flat_calls_are_public(model: nn.Module) -> None:
    """Which call has no graph of its own, in which phase, and why; of sound programs none."""
    program = with_the_last_given_to_the_first(model, Phase.FORWARD, joint=False)
    rows = program.flat_calls
    assert {str(row.call) for row in rows} >= {"0"}
    assert str(rows[0]).endswith("in the forward and comes back before it has finished")
    assert whence.capture(model, (X,)).flat_calls == ()
