import pytest
import torch
from torch import Tensor, nn

import whence
from tests.program.small import counted_program, sine_loss


class TwoBatches(nn.Module):
    """Structured inputs and outputs, a buffer that changes, and one weight under two names."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, batch: dict[str, Tensor], *, scale: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        hidden = self.encoder(batch["features"]) * batch["mask"]
        return {"hidden": hidden, "logits": self.decoder(hidden) * scale}


@pytest.fixture(scope="module")
def program() -> whence.Program:
    batch = {"features": torch.randn(3, 4), "mask": torch.ones(3, 1)}
    return whence.capture(TwoBatches(), (batch,), {"scale": torch.tensor(2.0)}, backward=True)


@pytest.mark.parametrize("name", ["p_encoder_weight", "encoder.weight", "decoder.weight"])
def test_parameter_by_every_name(program: whence.Program, name: str) -> None:
    """A tied parameter is found by its placeholder and by each of its qualified names."""
    row = program.input(name)
    assert (row.name, row.kind) == ("p_encoder_weight", whence.InputKind.PARAMETER)


@pytest.mark.parametrize("name", ["b_steps", "steps"])
def test_buffer_by_every_name(program: whence.Program, name: str) -> None:
    """A buffer is found by its placeholder and by its qualified name."""
    assert program.input(name).kind is whence.InputKind.BUFFER


@pytest.mark.parametrize("name", ["batch_mask", "args[0]['mask']"])
def test_user_input_by_every_name(program: whence.Program, name: str) -> None:
    """A positional input is found by its placeholder and by the access a person would write."""
    assert program.input(name).path == "args[0]['mask']"


@pytest.mark.parametrize("name", ["scale", "kwargs['scale']"])
def test_keyword_input_by_every_name(program: whence.Program, name: str) -> None:
    """A keyword input is found by its own name and by its access."""
    assert program.input(name).path == "kwargs['scale']"


@pytest.mark.parametrize("name", ["output_logits", "output['logits']"])
def test_output_by_every_name(program: whence.Program, name: str) -> None:
    """A returned value is found by its name and by its access."""
    assert program.output(name).path == "output['logits']"


def test_output_by_its_node(program: whence.Program) -> None:
    """A returned value is found by the node that holds it."""
    row = program.output("output_logits")
    assert row.node is not None
    assert program.output(row.node) == row


@pytest.mark.parametrize(
    "name", ["grad_p_encoder_weight", "encoder.weight", "decoder.weight", "p_encoder_weight"]
)
def test_gradient_by_every_name_of_its_parameter(program: whence.Program, name: str) -> None:
    """The gradient of a parameter is found under its own name and under each name of the parameter."""
    row = program.output(name)
    assert (row.kind, row.of) == (whence.OutputKind.GRADIENT, "p_encoder_weight")


@pytest.mark.parametrize("name", ["new_b_steps", "steps", "b_steps"])
def test_mutation_by_every_name_of_its_buffer(program: whence.Program, name: str) -> None:
    """The new value of a buffer is found under its own name and under those of the buffer."""
    row = program.output(name)
    assert (row.kind, row.of) == (whence.OutputKind.MUTATION, "b_steps")


def test_tangent_names_its_output(program: whence.Program) -> None:
    """The gradient that comes in for an output says which output it belongs to."""
    tangents = program.signature.inputs_of(whence.InputKind.TANGENT)
    assert [row.of for row in tangents] == ["output_hidden", "output_logits"]


def test_ambiguous_output_lists_the_candidates(program: whence.Program) -> None:
    """A name that fits a tangent's path and nothing else of its kind is no ambiguity; two of a kind are."""
    with pytest.raises(whence.SelectionError, match="fits several") as caught:
        whence.capture(_Twice(), (torch.randn(2, 4),), backward=True).output("add")
    assert "output_0, output_1" in str(caught.value)


class _Twice(nn.Module):
    """Returns one value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        moved = features + self.shift
        return moved, moved


def test_state_with_a_gradient_and_a_new_value_is_ambiguous() -> None:
    """A parameter that is both written and differentiated has two outputs, and the error names both."""

    class Shrinking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, features: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return features * self.weight

    program = whence.capture(Shrinking(), (torch.randn(2, 4),), backward=sine_loss)
    with pytest.raises(whence.SelectionError, match="new_p_weight, grad_p_weight"):
        program.output("weight")


@pytest.mark.parametrize(
    ("name", "hint"), [("encoder.wieght", "encoder.weight"), ("batch_msk", "batch_mask")]
)
def test_unknown_input_names_near_misses(program: whence.Program, name: str, hint: str) -> None:
    """A misspelled input says what is close to it."""
    with pytest.raises(whence.SelectionError, match="no input is called") as caught:
        program.input(name)
    assert hint in str(caught.value)


def test_unknown_output_names_near_misses(program: whence.Program) -> None:
    """A misspelled output says what is close to it."""
    with pytest.raises(whence.SelectionError, match="no output is called") as caught:
        program.output("output_logit")
    assert "output_logits" in str(caught.value)


def test_hopeless_name_points_to_the_list(program: whence.Program) -> None:
    """A name that is close to nothing says where all names are printed."""
    with pytest.raises(whence.SelectionError, match=r"print\(program.signature\)"):
        program.input("zzzzzz")


def test_node_by_name(program: whence.Program) -> None:
    """A node is found by its name, and so is its origin."""
    node = next(iter(program.select("encoder")))
    assert program.node(node.name) is node
    assert program.where(node.name) == program.where(node)


def test_unknown_node_names_near_misses() -> None:
    """A misspelled node says what is close to it."""
    with pytest.raises(whence.SelectionError, match="no node is called 'rleu'") as caught:
        counted_program().where("rleu")
    assert "relu" in str(caught.value)


def test_state_as_attributes_is_found_the_same_way(program: whence.Program) -> None:
    """Inputs that became attributes keep their names."""
    attributes = program.with_state("attributes")
    for name in ("p_encoder_weight", "encoder.weight", "decoder.weight"):
        assert attributes.input(name).path == "encoder.weight"
    assert attributes.output("encoder.weight").name == "grad_p_encoder_weight"
