"""Each rule is shown a program that breaks it."""

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

import whence
from tests.program.small import counted_program, sine_loss
from whence import CallSite, ModulePath, Phase, Quality
from whence.program import wellformed
from whence.program.node_records import origin_of, set_origin

Breaking = Callable[[], whence.Program]
aten = torch.ops.aten


def joint() -> whence.Program:
    return counted_program(sine_loss)


def node_of(program: whence.Program, target: object) -> fx.Node:
    return next(node for node in program.graph.nodes if node.target is target)


def with_signature(program: whence.Program, **changes: object) -> whence.Program:
    return program.with_changes(signature=replace(program.signature, **changes))  # type: ignore[arg-type]


def input_row_missing() -> whence.Program:
    return with_signature(program := joint(), inputs=program.signature.inputs[1:])


def input_row_added() -> whence.Program:
    rows = (program := joint()).signature.inputs
    return with_signature(program, inputs=(*rows, replace(rows[0], name="p_extra")))


def input_rows_swapped() -> whence.Program:
    first, second, *rest = (program := joint()).signature.inputs
    return with_signature(program, inputs=(second, first, *rest))


def attribute_row_missing() -> whence.Program:
    program = joint().with_state("attributes")
    return with_signature(program, attributes=program.signature.attributes[1:])


def attribute_row_added() -> whence.Program:
    program = joint().with_state("attributes")
    extra = replace(program.signature.attributes[0], name="p_extra")
    changed = with_signature(program, attributes=(*program.signature.attributes, extra))
    return changed.with_changes(state={**program.state, "p_extra": program.state["p_first_weight"]})


def state_missing() -> whence.Program:
    program = joint()
    return program.with_changes(state={n: t for n, t in program.state.items() if n != "p_first_weight"})


def state_of_another_shape() -> whence.Program:
    program = joint()
    return program.with_changes(state={**program.state, "p_first_weight": torch.zeros(2, 4)})


def output_row_missing() -> whence.Program:
    return with_signature(program := joint(), outputs=program.signature.outputs[1:])


def output_row_of_another_node() -> whence.Program:
    first, *rest = (program := joint()).signature.outputs
    return with_signature(program, outputs=(replace(first, node="relu"), *rest))


def output_rows_swapped() -> whence.Program:
    first, second, *rest = (program := joint()).signature.outputs
    return with_signature(program, outputs=(second, first, *rest))


def output_constant_described_as_node() -> whence.Program:
    program = joint()
    last = next(iter(reversed(program.graph.nodes)))
    last.args = ((None, *last.args[0][1:]),)
    return program


def output_node_missing() -> whence.Program:
    program = joint()
    program.graph.erase_node(next(iter(reversed(program.graph.nodes))))
    return program


def origin_missing() -> whence.Program:
    program = joint()
    node_of(program, aten.relu.default).meta.pop("whence")
    return program


def origin_unknown() -> whence.Program:
    node = node_of(program := joint(), aten.relu.default)
    set_origin(node, origin_of(node)._replace(quality=Quality.NONE))
    return program


def forward_node_unknown() -> whence.Program:
    node = node_of(program := joint(), aten.threshold_backward.default)
    set_origin(node, origin_of(node)._replace(forward="nowhere"))
    return program


def call_unknown() -> whence.Program:
    node = node_of(program := joint(), aten.mm.default)
    set_origin(node, origin_of(node)._replace(calls=(CallSite(ModulePath.parse("first"), 7, "Linear"),)))
    return program


def place_unknown() -> whence.Program:
    node = node_of(program := joint(), aten.mm.default)
    set_origin(node, origin_of(node)._replace(place=CallSite(ModulePath.parse("nowhere"), 0, "Linear")))
    return program


def input_written() -> whence.Program:
    relu = node_of(program := joint(), aten.relu.default)
    relu.target = aten.relu_.default
    return program


def output_argument_written() -> whence.Program:
    mm = node_of(program := joint(), aten.mm.default)
    mm.target = aten.mm.out
    mm.kwargs = {"out": mm.args[0]}
    return program


def value_read_before_it_is_made() -> whence.Program:
    program = joint()
    node_of(program, aten.relu.default).append(node_of(program, aten.mm.default))
    return program


def forward_reads_backward() -> whence.Program:
    node = node_of(program := joint(), aten.relu.default)
    set_origin(node, origin_of(node)._replace(phase=Phase.BACKWARD))
    return program


def symbol_without_a_node() -> whence.Program:
    shapes = ({0: torch.export.Dim("batch")},)
    program = whence.capture(lambda x: x.sin(), (torch.ones(3, 2),), dynamic_shapes=shapes)
    sine = node_of(program, aten.sin.default)
    sine.target, sine.args = aten.add.Tensor, (sine.args[0], sine.meta["val"].shape[0])
    return program


BROKEN: dict[str, list[tuple[Breaking, str]]] = {
    "inputs_match": [
        (input_row_missing, "placeholders and inputs differ: p_first_weight"),
        (input_row_added, "placeholders and inputs differ: p_extra"),
        (input_rows_swapped, "placeholders and inputs differ: their order"),
    ],
    "attributes_match": [
        (attribute_row_missing, "get_attr nodes without a row: p_first_weight"),
        (attribute_row_added, "attributes that no get_attr node reads: p_extra"),
    ],
    "state_present": [
        (state_missing, "first.weight is in the signature and not in the state"),
        (state_of_another_shape, r"first.weight was f32\[4, 4\] at capture, and is f32\[2, 4\] in the state"),
    ],
    "outputs_match": [
        (output_row_missing, "4 values are returned, 3 are described"),
        (output_row_of_another_node, "output loss is sum_1, not relu"),
        (output_rows_swapped, "output output is sum_1, not mul"),
        (output_constant_described_as_node, "output loss is None, not sum_1"),
        (output_node_missing, "0 values are returned, 4 are described"),
    ],
    "origins_present": [(origin_missing, "relu has no origin"), (origin_unknown, "relu has no origin")],
    "origins_resolve": [
        (forward_node_unknown, "threshold_backward differentiates nowhere, which does not exist"),
        (call_unknown, "mm comes from a call that was not made"),
        (place_unknown, "mm comes from a call that was not made"),
    ],
    "is_functional": [
        (input_written, r"relu \(aten.relu_.default\) changes an input"),
        (output_argument_written, r"mm \(aten.mm.out\) changes an input"),
    ],
    "values_in_order": [(value_read_before_it_is_made, "relu reads mm, which comes after it")],
    "sizes_are_nodes": [(symbol_without_a_node, "sin is given s[0-9]+, which no node computes")],
    "phases_in_order": [(forward_reads_backward, "mm_1 runs in the forward and reads relu of the backward")],
}
CASES = [pytest.param(*case, id=case[0].__name__) for cases in BROKEN.values() for case in cases]


@pytest.mark.parametrize(("breaking", "message"), CASES)
def test_broken_program_is_refused(breaking: Breaking, message: str) -> None:
    """A program that breaks one rule is malformed, and the error says what is wrong where."""
    with pytest.raises(whence.MalformedProgram, match=message):
        wellformed.check(breaking())


def test_every_rule_is_broken_once() -> None:
    """No rule is without a program that makes it fire."""
    assert {rule.__name__ for rule in wellformed.RULES} == set(BROKEN)


@pytest.mark.parametrize("view", ["inputs", "attributes"])
def test_captured_program_is_well_formed(view: str) -> None:
    """What capture gives keeps every rule, in both views of its state."""
    wellformed.check(joint().with_state(view))


def test_every_fault_is_named() -> None:
    """Two faults of two kinds are reported together."""
    program = input_row_missing()
    node_of(program, aten.relu.default).target = aten.relu_.default
    with pytest.raises(whence.MalformedProgram, match=r"placeholders and inputs differ.*changes an input"):
        wellformed.check(program)


def test_error_names_the_program() -> None:
    """The first line says which program it is."""
    with pytest.raises(whence.MalformedProgram, match="the program Counted is malformed"):
        wellformed.check(input_row_missing())


def test_getitem_is_no_fault() -> None:
    """Plain Python calls in a graph, such as taking one of several results, change nothing."""
    program = joint()
    with program.graph.inserting_before(node_of(program, aten.relu.default)):
        split = program.graph.call_function(aten.split.Tensor, (node_of(program, aten.mm.default), 2))
        piece = program.graph.call_function(operator.getitem, (split, 0))
    for node in (split, piece):
        set_origin(node, origin_of(node_of(program, aten.mm.default)))
    wellformed.check(program)


def test_program_is_shown_with_the_message_at_the_node() -> None:
    """The graph around each fault, the fault below its node; whoever makes modules of it is told the same."""
    program = state_missing()
    node_of(program, aten.relu.default).meta.pop("whence")
    for make in (program.module, program.unflatten, lambda: wellformed.check(program)):
        with pytest.raises(whence.MalformedProgram) as caught:
            make()
        text = str(caught.value)
        assert "p_first_weight: f32[4, 4] = placeholder\n      ^ first.weight is in the signature" in text
        assert "relu: f32[3, 4] = aten.relu.default(mm)\n      ^ relu has no origin" in text
        assert "give the program the tensors of its model" in text
