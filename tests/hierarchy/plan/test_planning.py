import pytest
import torch

import whence
from tests.checks import captured
from tests.models import MODES, ModelCase, sampled_cases
from tests.program.small import counted_program, sine_loss, stack_program
from whence.hierarchy.plan.check import check
from whence.hierarchy.plan.plan import ROOT_CALL, Plan
from whence.hierarchy.plan.planning import plan
from whence.provenance import ModulePath


def site(planned: Plan, path: str) -> int:
    return next(number for number in planned.calls if str(planned.site(number)) == path)


@pytest.fixture(scope="module")
def forward() -> Plan:
    return plan(stack_program())


@pytest.fixture(scope="module")
def joint() -> Plan:
    return plan(stack_program(sine_loss))


def test_every_call_gets_a_graph_of_its_own(forward: Plan) -> None:
    """Every module that was called has a body; the model's own call is the program's."""
    paths = {str(forward.site(number)) for number in forward.calls if number != ROOT_CALL}
    assert paths == {str(call.site) for call in forward.program.calls if call.site.path}


def test_body_holds_its_own_operations_and_calls(forward: Plan) -> None:
    """The steps of a call are its own nodes by name and the calls inside it by number, in order."""
    layer = forward.calls[site(forward, "layers.0")]
    attention, mlp = site(forward, "layers.0.attention"), site(forward, "layers.0.mlp")
    assert layer.forward.steps == (attention, mlp, "add")


def test_inputs_and_outputs_cross_the_border(forward: Plan) -> None:
    """A call takes what it reads from outside and gives what outside reads from it."""
    layer = forward.calls[site(forward, "layers.0")].forward
    assert (layer.inputs, layer.outputs) == (("features",), ("add",))


def test_state_is_read_by_the_module_that_holds_it(forward: Plan) -> None:
    """A parameter is no input: its module reads it, by the attribute path from there."""
    attention = forward.calls[site(forward, "layers.0.attention")].forward
    assert attention.reads == (("p_layers_0_attention_weight", ModulePath(("weight",))),)
    assert attention.inputs == ("features",)


def test_forward_plan_has_no_backward(forward: Plan) -> None:
    """Without a captured backward there are no backward bodies and nothing is kept."""
    assert {call.backward for call in forward.calls.values()} == {None}
    assert {call.forward.kept for call in forward.calls.values()} == {()}


def test_backward_takes_tangents_and_gives_gradients(joint: Plan) -> None:
    """The backward of a call takes gradients of its outputs and gives gradients of its inputs."""
    call = joint.calls[site(joint, "layers.1.attention")]
    assert call.backward is not None
    assert len(call.backward.inputs) == 1
    assert len(call.backward.outputs) == 2


def test_forward_keeps_what_the_backward_needs(joint: Plan) -> None:
    """Values of the forward that the backward of the same call reads are kept by it."""
    call = joint.calls[site(joint, "layers.0.mlp.1")]
    assert call.backward is not None
    assert call.forward.kept == call.backward.kept
    assert call.forward.kept


def test_flat_plan_has_one_graph() -> None:
    """A flat plan holds everything in the program's own graph."""
    flat = plan(stack_program(sine_loss), flat=True)
    assert {number for _, number in flat.regions.values()} == {ROOT_CALL}
    assert [number for number, call in flat.calls.items() if call.forward.steps] == [ROOT_CALL]


def test_shared_module_has_a_body_for_each_call() -> None:
    """A module called under two names has two bodies."""
    planned = plan(counted_program())
    assert {"first", "second"} <= {str(planned.site(number)) for number in planned.calls}


def test_recomputed_calls_are_calls_of_their_own() -> None:
    """What a checkpoint runs again is numbered after the calls of the program, and says what it repeats."""
    planned = plan(captured("checkpoint", "loss"))
    count = len(planned.program.calls.rows)
    repeated = [number for number in planned.calls if number >= count]
    assert repeated
    assert all(planned.site(number) == planned.site(planned.original(number)) for number in repeated)


@pytest.mark.sample(14)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", sampled_cases())
def test_plan_of_the_table_holds_and_flattens_nothing(row: ModelCase, mode: str) -> None:
    """The plan of every model of the table passes the check, and every call gets its own graph."""
    planned = plan(captured(row.name, mode))
    check(planned)
    assert planned.flattened == ()


def test_plan_does_not_change_the_program() -> None:
    """Planning reads the program and leaves its graph as it is."""
    program = stack_program(sine_loss)
    before = str(program)
    plan(program)
    assert str(program) == before
    assert isinstance(program, whence.Program)
    assert torch.is_grad_enabled()
