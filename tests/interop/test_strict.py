"""Capture through PyTorch's bytecode front end: the same type of program, with the user's paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.behaviours.test_exports_of_the_table import NOT_STRICT, QUICK
from tests.models import MODEL_CASES, ModelCase

WITHOUT_BACKWARD = frozenset(["custom_function"])
"""torch.export replaces a custom autograd function by its forward: the gradients are others, silently."""


def _how_long(row: ModelCase) -> Any:
    """Two captures through the front end take seconds for a model of transformers."""
    marks = [] if row.name in QUICK else [pytest.mark.slow]
    return [*marks, pytest.mark.sweep] if "hf" in row.tags else marks


ROWS = [
    pytest.param(row, id=row.name, marks=_how_long(row))
    for row in MODEL_CASES
    if "no_export" not in row.tags and row.name not in NOT_STRICT | WITHOUT_BACKWARD
]


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", ROWS)
def test_forward_and_joint_equal_eager(row: ModelCase) -> None:
    """Outputs, gradients, buffers and names; where the model asks whether it is compiled, told the same."""
    model, args, kwargs = row.make()
    forward = whence.capture(model, args, kwargs, strict=True)
    joint = whence.capture(model, args, kwargs, backward=row.loss, strict=True)
    for program in (forward, joint):
        found = program.verify(model, args, kwargs)
        assert found.ok or found.explained, str(found)
        assert {row.module_type for row in program.signature.inputs} & {"Tree"} == set()
    assert list(forward.unflatten().state_dict()) == list(model.state_dict())


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        """Some of the code is never run by tracing, and read by the front end all the same."""
        with torch.no_grad():
            scale = x.abs().mean()
        return x + self.down(self.up(x).relu()) / (1 + scale)


class Model(nn.Module):
    """Layers in a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("unused", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Any:
        """Leaves the first out."""
        for block in self.blocks[1:]:
            x = block(x)
        return x


def test_paths_are_the_users() -> None:
    """Without `L["self"]`, slices and wrapper names; the lines are the model's, in the backward too."""
    model, x = Model(), torch.randn(2, 8)
    program = whence.capture(model, (x,), backward=True, strict=True)
    assert [str(call.site) for call in program.calls][:3] == ["", "blocks.1", "blocks.1.up"]
    node = program.select("blocks.2.down :: aten.mm.default :: backward")[0]
    assert str(program.where(node).source).startswith(__file__)
    assert program.verify(model, (x,)).ok


ACTIVATION = nn.GELU()


class Outside(nn.Module):
    """Calls a module that a global variable holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Data2Vec does so."""
        return ACTIVATION(self.linear(x))


def test_a_module_outside_the_model_is_a_part_of_its_caller() -> None:
    """As it is without the front end: the tree has the model's modules, and instances of its classes."""
    model, x = Outside(), torch.randn(2, 8)
    program = whence.capture(model, (x,), strict=True)
    assert [str(call.site) for call in program.calls] == ["", "linear"]
    assert [name for name, _ in program.unflatten().named_modules()] == ["", "linear"]
    assert torch.equal(program.unflatten(onto=model)(x), model(x))


def test_the_tensors_are_the_models() -> None:
    """Training the tree trains the model; what the export left out is there."""
    model, x = Model(), torch.randn(2, 8)
    tree = whence.capture(model, (x,), backward=True, strict=True).unflatten()
    assert {id(p) for p in tree.parameters()} == {id(p) for p in model.parameters()}
    assert dict(tree.named_buffers())["unused"] is model.unused
    assert [name for name, _ in tree.named_modules()] == [name for name, _ in model.named_modules()]


def test_state_may_be_attributes() -> None:
    """The other view of the state."""
    program = whence.capture(Model(), (torch.randn(2, 8),), strict=True, state="attributes")
    assert any(node.op == "get_attr" for node in program.graph.nodes)


def test_a_function_is_refused() -> None:
    """In words."""
    with pytest.raises(whence.NotCallable, match="strict=True takes a module"):
        whence.capture(torch.sin, (torch.ones(2),), strict=True)


def test_what_the_front_end_refuses_stays_its_own_error() -> None:
    """With a note that says what else to do."""

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(Exception, match="control flow") as raised:
        whence.capture(Branches(), (torch.ones(2),), strict=True)
    assert any("strict=False runs the model" in note for note in raised.value.__notes__)


def test_calling_conventions_are_preserved() -> None:
    """A preserved module is replaced in the tree of a strict program; others are errors."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 8)
    tree = whence.capture(model, (x,), strict=True, preserve_calls="blocks.1").unflatten(copy=True)
    model.blocks[1] = Block()
    tree.set_submodule("blocks.1", model.blocks[1])
    assert torch.equal(tree(x), model(x))
    with pytest.raises(whence.SelectionError, match="nope"):
        whence.capture(model, (x,), strict=True, preserve_calls="nope")
    with pytest.raises(whence.UsageError, match="does not work with strict=True and a backward"):
        whence.capture(model, (x,), backward=True, strict=True, preserve_calls="blocks.1")


class Asks(nn.Module):
    """Goes another way when it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.compiler.is_compiling() else x * 3


def test_what_a_model_does_because_it_is_read_is_explained() -> None:
    """The front end says that it compiles: eager that is told so is compared, too."""
    found = whence.capture(Asks(), (torch.ones(2),), strict=True).verify(Asks(), (torch.ones(2),))
    assert found.explained and not found.ok
    assert "as torch.export says, is equal, bit for bit" in str(found)


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Custom(nn.Module):
    """Uses it, beside a way that gradients take, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        result: Tensor = Doubled.apply(hidden) + hidden
        return result


class CustomAlone(Custom):
    """Gradients take this way alone, and the result of what the front end has read carries none."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Doubled.apply(self.linear(x))
        return result


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the front end
@pytest.mark.parametrize("kind", [Custom, CustomAlone])
def test_a_custom_autograd_function_has_no_backward_there(kind: type[Custom]) -> None:
    """The front end reads its forward alone: the reason is told, in place of gradients that lack a part."""
    model, x = kind(), torch.randn(2, 4)
    with pytest.raises(whence.NotDifferentiable, match="runs a custom autograd function"):
        whence.capture(model, (x,), strict=True, backward=torch.sum)
    tree = whence.capture(model, (x,), strict=True).unflatten()
    with torch.no_grad():
        assert torch.equal(tree(x), model(x))
    with pytest.raises(whence.NotDifferentiable, match="it ran a custom autograd function"):
        tree(x).sum().backward()
