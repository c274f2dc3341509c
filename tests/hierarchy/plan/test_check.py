"""Each fault of a plan is shown a plan that has it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

import whence
from tests.program.small import sine_loss, stack_program
from whence.hierarchy.plan.check import check
from whence.hierarchy.plan.plan import ROOT_CALL, Body, Plan
from whence.hierarchy.plan.planning import plan

Corrupting = Callable[[Plan], Plan]


@pytest.fixture(scope="module")
def sound() -> Plan:
    return plan(stack_program(sine_loss))


def number_of(planned: Plan, path: str) -> int:
    return next(number for number in planned.calls if str(planned.site(number)) == path)


def with_forward(planned: Plan, path: str, **changes: object) -> Plan:
    """The plan with another forward body for one call."""
    number = number_of(planned, path) if path else ROOT_CALL
    call = planned.calls[number]
    body: Body = replace(call.forward, **changes)  # type: ignore[arg-type]
    return replace(planned, calls={**planned.calls, number: replace(call, forward=body)})


def with_backward(planned: Plan, path: str, **changes: object) -> Plan:
    """The plan with another backward body for one call."""
    number = number_of(planned, path) if path else ROOT_CALL
    call = planned.calls[number]
    assert call.backward is not None
    body: Body = replace(call.backward, **changes)  # type: ignore[arg-type]
    return replace(planned, calls={**planned.calls, number: replace(call, backward=body)})


def steps(planned: Plan, path: str) -> tuple[str | int, ...]:
    return planned.calls[number_of(planned, path)].forward.steps


def node_forgotten(planned: Plan) -> Plan:
    return with_forward(planned, "layers.0", steps=steps(planned, "layers.0")[:-1])


def node_twice(planned: Plan) -> Plan:
    return with_forward(planned, "layers.0", steps=(*steps(planned, "layers.0"), "add"))


def node_in_two_calls(planned: Plan) -> Plan:
    return with_forward(planned, "layers.1", steps=(*steps(planned, "layers.1"), "add"))


def wrong_order(planned: Plan) -> Plan:
    return with_forward(planned, "layers.0", steps=tuple(reversed(steps(planned, "layers.0"))))


def input_missing(planned: Plan) -> Plan:
    return with_forward(planned, "layers.0.attention", inputs=())


def state_missing(planned: Plan) -> Plan:
    return with_forward(planned, "layers.0.attention", reads=())


def output_without_value(planned: Plan) -> Plan:
    return with_forward(planned, "layers.0.attention", outputs=("mm", "relu"))


def kept_without_value(planned: Plan) -> Plan:
    return with_forward(planned, "layers.0.attention", kept=("relu",))


def tangent_missing(planned: Plan) -> Plan:
    return with_backward(planned, "layers.0.attention", inputs=())


def kept_forgotten(planned: Plan) -> Plan:
    return with_backward(planned, "layers.0.mlp.1", kept=())


def gradient_without_value(planned: Plan) -> Plan:
    return with_backward(planned, "layers.0.attention", outputs=("nothing",))


@pytest.mark.parametrize(
    ("corrupting", "message"),
    [
        (node_forgotten, "add runs 0 times"),
        (node_twice, "add runs 2 times"),
        (node_in_two_calls, "add runs 2 times"),
        (wrong_order, r"layers.0 \(forward\): add runs before relu"),
        (input_missing, r"layers.0.attention \(forward\): mm runs before features"),
        (state_missing, r"layers.0.attention \(forward\): t runs before p_layers_0_attention_weight"),
        (output_without_value, r"layers.0.attention \(forward\): hands out relu without having it"),
        (kept_without_value, r"layers.0.attention \(forward\): hands out relu without having it"),
        (tangent_missing, r"layers.0.attention \(backward\): .* runs before "),
        (kept_forgotten, r"layers.0.mlp.1 \(backward\): .* runs before "),
        (gradient_without_value, r"layers.0.attention \(backward\): hands out nothing without having it"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_corrupted_plan_is_refused(sound: Plan, corrupting: Corrupting, message: str) -> None:
    """A plan with one fault is malformed, and the error names the call, the phase and the value."""
    with pytest.raises(whence.MalformedProgram, match=message):
        check(corrupting(sound))


def test_sound_plan_passes(sound: Plan) -> None:
    """The plan of a program has no faults."""
    check(sound)


def test_all_faults_are_named(sound: Plan) -> None:
    """Two faults in two calls are reported together."""
    with pytest.raises(whence.MalformedProgram, match=r"relu without having it.*relu without having it"):
        check(kept_without_value(with_forward(sound, "head", outputs=("addmm", "relu"))))
