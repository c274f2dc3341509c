from collections.abc import Callable

import pytest
import torch
from torch import nn

import whence
from tests import zoo
from tests.checks import Backward, verified
from tests.program.small import counted_program, sine_loss, stack_program
from whence.program.node_records import origin_of

BOTH_WAYS = [("inputs", "attributes"), ("attributes", "inputs")]
MODELS: list[Callable[[], nn.Module]] = [zoo.ConstantTensors, zoo.RunningStatistics, zoo.TiedAutoencoder]


def operations(program: whence.Program) -> list[tuple[str, whence.Origin]]:
    return [(node.name, origin_of(node)) for node in program.nodes() if node.op == "call_function"]


@pytest.mark.parametrize("backward", [False, True, sine_loss])
def test_origins_are_the_same_in_both_views(backward: Backward) -> None:
    """Changing the view of the state changes neither the operations nor their origins."""
    inputs = counted_program(backward)
    attributes = inputs.with_state("attributes")
    assert operations(attributes) == operations(inputs)
    assert operations(attributes.with_state("inputs")) == operations(inputs)


def test_attributes_replace_placeholders() -> None:
    """With state as attributes only the user's inputs are placeholders; attributes are read by name."""
    program = stack_program(depth=1).with_state("attributes")
    placeholders = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    read = [node.target for node in program.graph.nodes if node.op == "get_attr"]
    assert placeholders == [row.name for row in program.signature.inputs] == ["features"]
    assert read == [row.path for row in program.signature.attributes]
    assert read == ["layers.0.attention.weight", "layers.0.mlp.0.weight", "head.weight", "head.bias"]


def test_attributes_are_the_model_s_own_tensors() -> None:
    """The attributes of the graph module are shared with the model, not copied."""
    model = nn.Linear(4, 4)
    program = whence.capture(model, (torch.randn(2, 4),), state="attributes")
    assert program.graph_module.get_parameter("weight") is model.weight


def test_capture_gives_the_view_that_is_asked_for() -> None:
    """`state="attributes"` at capture is `with_state("attributes")` afterwards."""
    model, batch = nn.Linear(4, 4), torch.randn(2, 4)
    asked = whence.capture(model, (batch,), state="attributes")
    assert str(asked) == str(whence.capture(model, (batch,)).with_state("attributes"))


@pytest.mark.parametrize("view", ["inputs", "attributes"])
def test_same_view_is_the_same_program(view: str) -> None:
    """Asking for the view that is there changes nothing."""
    program = stack_program().with_state(view)
    assert program.with_state(view) is program


@pytest.mark.parametrize("there_and_back", BOTH_WAYS)
def test_there_and_back_is_the_same_text(there_and_back: tuple[str, str]) -> None:
    """Two changes of view give the program one began with."""
    view, other = there_and_back
    program = counted_program(sine_loss).with_state(view)
    assert str(program.with_state(other).with_state(view)) == str(program)


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("backward", [False, True, sine_loss])
def test_numbers_are_eager_s_in_both_views(build: Callable[[], nn.Module], backward: bool) -> None:
    """Parameters, buffers, constants and shared weights give eager's bits as attributes too."""
    torch.manual_seed(0)
    model, features = build(), torch.randn(2, 8, zoo.WIDTH)
    program = verified(model, features, backward=backward).with_state("attributes")
    assert program.verify(model, (features,)).ok
    assert program.with_state("inputs").verify(model, (features,)).ok


def test_graph_module_runs_with_attributes() -> None:
    """A graph with its state as attributes takes the user's inputs alone, as `torch.fx` runs it."""
    model, features = nn.Linear(4, 4), torch.randn(2, 4)
    program = whence.capture(model, (features,), state="attributes")
    (output,) = program.graph_module(features)
    assert torch.equal(output, model(features))


def test_tree_of_a_program_with_attributes() -> None:
    """Unflattening does not depend on the view of the state."""
    model, features = zoo.Mlp(), torch.randn(2, zoo.WIDTH)
    tree = whence.capture(model, (features,), state="attributes").unflatten()
    assert torch.equal(tree(features), model(features))


def test_unknown_view_is_refused() -> None:
    """Any other view is a usage error that names the two there are."""
    with pytest.raises(whence.UsageError, match='use "inputs" or "attributes"'):
        stack_program().with_state("weights")


def test_model_without_state() -> None:
    """A program without any state is the same in both views."""
    program = whence.capture(torch.relu, (torch.randn(2),))
    assert program.with_state("attributes") is program
