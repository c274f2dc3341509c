from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests import zoo
from tests.checks import captured, verified
from tests.program.small import counted_program, sine_loss, stack_program
from whence import InputKind, OutputKind
from whence.program.signature import describe


def names(rows: tuple[whence.Input, ...]) -> list[str]:
    return [row.name for row in rows]


def test_inputs_are_state_then_user_then_tangents() -> None:
    """Placeholders come as parameters, buffers, constants, the user's inputs, tangents."""
    kinds = [row.kind for row in captured("constants", "tangents").signature.inputs]
    order = [InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT, InputKind.USER, InputKind.TANGENT]
    assert list(dict.fromkeys(kinds)) == order
    assert kinds == sorted(kinds, key=order.index)


def test_outputs_are_loss_then_user_then_mutations_then_gradients() -> None:
    """Returned values come as the loss, the user's outputs, new values, gradients."""
    kinds = [row.kind for row in counted_program(sine_loss).signature.outputs]
    assert kinds == [OutputKind.LOSS, OutputKind.USER, OutputKind.MUTATION, OutputKind.GRADIENT]


def test_placeholder_names_say_what_they_are() -> None:
    """Names begin with the kind of state and spell its qualified name; user inputs keep the user's names."""
    assert names(stack_program(depth=1, backward=True).signature.inputs) == [
        "p_layers_0_attention_weight",
        "p_layers_0_mlp_0_weight",
        "p_head_weight",
        "p_head_bias",
        "features",
        "tangent_0",
    ]


@pytest.mark.parametrize("backward", [False, True])
def test_module_that_no_argument_can_be_called_like(backward: bool) -> None:
    """What Python has no spelling for is left out of names of placeholders, and the graph runs."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("<then>", nn.Linear(2, 2))
    program = verified(model, torch.ones(1, 2), backward=backward)
    assert names(program.signature.inputs)[2] == "p__then__weight"
    assert program.graph_module(*[torch.ones(row.value.shape) for row in program.signature.inputs])


def test_state_row_names_its_module() -> None:
    """A parameter says which module holds it and of which class that is."""
    row = stack_program().input("layers.1.mlp.0.weight")
    assert (str(row.module), row.module_type) == ("layers.1.mlp.0", "Linear")


def test_tied_parameter_is_one_input() -> None:
    """A parameter with two names is one placeholder with an alias."""
    row = captured("tied_language_model", "forward").input("head.weight")
    assert (row.path, row.aliases) == ("embedding.weight", ("head.weight",))


def test_unused_parameter_keeps_its_row() -> None:
    """A parameter that nothing reads is an input all the same, and its gradient is absent."""
    program = captured("partly_frozen", "loss")
    assert program.input("unused.weight").name == "p_unused_weight"
    assert program.output("grad_p_unused_weight").node is None


def test_frozen_parameter_has_no_gradient() -> None:
    """A parameter that takes no gradient has no gradient output."""
    program = captured("partly_frozen", "loss")
    assert "grad_p_frozen_weight" not in [row.name for row in program.signature.outputs]


def test_non_persistent_buffer_is_marked() -> None:
    """A buffer that is not saved says so."""
    assert captured("constants", "forward").input("decay").persistent is False


def test_tensor_attribute_is_a_constant() -> None:
    """A plain tensor attribute of a module is a constant under its qualified name."""
    row = captured("constants", "forward").input("basis")
    assert (row.kind, row.path) == (InputKind.CONSTANT, "basis")


def test_input_that_requires_a_gradient_has_one() -> None:
    """The gradient of a user's input is an output under the input's name."""
    program = captured("energy_forces", "loss")
    assert program.output("grad_positions").path == "args[0]"


def test_non_tensor_input_is_a_placeholder() -> None:
    """A number given as an input keeps its place in the signature, with the value it had."""

    class Scaled(nn.Module):
        def forward(self, batch: Tensor, factor: float) -> Tensor:
            return batch * factor

    row = whence.capture(Scaled(), (torch.randn(2), 3.0)).input("factor")
    assert (row.kind, row.value) == (InputKind.USER, 3.0)


def test_constant_output_has_a_value_and_no_node() -> None:
    """A number among the returned values is described, not computed."""
    row = captured("aliased_outputs", "forward").output("output_5")
    assert (row.node, row.value) == (None, 2)


def test_values_are_fake_tensors() -> None:
    """The value of an input tells shape, dtype and whether a gradient is required, and holds no numbers."""
    row = stack_program().input("head.weight")
    assert (row.value.shape, row.value.dtype, row.value.requires_grad) == ((2, 4), torch.float32, True)
    assert type(row.value) is not Tensor


def test_builtin_name_is_kept() -> None:
    """An argument that is named like a Python builtin keeps its name."""
    assert names(whence.capture(nn.ReLU(), (torch.randn(2),)).signature.inputs) == ["input"]


def clash_with_a_parameter() -> whence.Program:
    class Clashing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, p_weight: Tensor) -> Tensor:
            return p_weight * self.weight

    return whence.capture(Clashing(), (torch.zeros(2),))


def clash_between_parameters() -> whence.Program:
    model: Any = nn.Module()
    model.register_parameter("a_b", nn.Parameter(torch.ones(2)))
    model.a = nn.Module()
    model.a.register_parameter("b", nn.Parameter(torch.ones(2)))
    return whence.capture(lambda: model.a_b * model.a.b)


def clash_between_constants() -> whence.Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale_by = torch.ones(4)
            self.scale: Any = nn.Identity()
            self.scale.by = torch.full((5, 4), 2.0)

        def forward(self, c_scale_by: Tensor) -> Tensor:
            return c_scale_by * self.scale_by + self.scale.by

    return whence.capture(Model(), (torch.ones(5, 4),))


@pytest.mark.parametrize("clash", [clash_with_a_parameter, clash_between_parameters, clash_between_constants])
def test_clashing_names_stay_apart(clash: Callable[[], whence.Program]) -> None:
    """Two inputs that would be called alike get two names, and each is found by its path."""
    program = clash()
    rows = program.signature.inputs
    assert len({row.name for row in rows}) == len(rows) >= 2
    assert [program.input(row.path) for row in rows] == list(rows)


def test_representations_are_short() -> None:
    """What a prompt shows of a deep program is a line, and not all that it holds."""
    program = stack_program(depth=2)
    shown = [program, program.calls, program.signature, program.guards, *program.layers()]
    assert all(len(repr(value)) < 80 for value in (*shown, *program.unflatten().calls))


def test_state_is_the_model_s_own() -> None:
    """The program's state are the tensors of the model, by the names of their inputs."""
    model = zoo.Mlp()
    program = whence.capture(model, (torch.randn(2, zoo.WIDTH),))
    assert program.state["p_up_weight"] is model.up.weight


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 8), "f32[2, 8]"),
        (torch.zeros((), dtype=torch.int64), "i64[]"),
        (torch.zeros(1, dtype=torch.bfloat16), "bf16[1]"),
        (torch.zeros(1, dtype=torch.bool), "bool[1]"),
        (3.5, "3.5"),
        (None, "None"),
        ("text", "'text'"),
    ],
)
def test_values_in_words(value: object, text: str) -> None:
    """A tensor is described by dtype and shape, anything else by its literal."""
    assert describe(value) == text
