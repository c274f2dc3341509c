"""Calling conventions of exported programs: rows 123 to 132 and the messages for bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import FlatArgsAdapter
from torch.export.experimental import _export_forward_backward
from torch.utils._pytree import TreeSpec

import whence
from tests.interop.helpers import (
    BOTH_FRONTS,
    EVERY_WAY,
    exported,
    is_eager,
    loaded,
    program_of,
    tree_of,
    unflattened,
)

X = torch.arange(8.0).reshape(2, 4)


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, pair: tuple[Tensor, dict[str, Tensor]], scale: float, *, unused: Tensor, nothing: None = None
    ) -> dict[str, Any]:
        x, more = pair
        return {"sum": self.linear(x) * scale + more["y"], "nothing": nothing, "scale": scale}


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Structured()
        self.same = nn.Identity()

    def forward(self, x: Tensor, batch: dict[str, Tensor], *, unused: Tensor) -> tuple[Tensor, None, float]:
        found = self.inner((x, {"y": batch["y"]}), 2.0, unused=unused + 1)
        return self.same(found["sum"]), None, found["scale"]


def around() -> Any:
    torch.manual_seed(0)
    return Around()


ARGS: tuple[Any, ...] = (X, {"y": torch.ones(4)})
KWARGS = {"unused": torch.zeros(2)}
PRESERVED = ("inner", "inner.linear", "same")


@EVERY_WAY
def test_rows_2_3_structured_inputs_and_outputs(way: str) -> None:
    """The root is called as the model is, and gives back what it gives, constants and None included."""
    tree = tree_of(around(), ARGS, KWARGS, way=way)
    result = tree(X, {"y": torch.ones(4)}, unused=torch.zeros(2))
    assert isinstance(result, tuple)
    assert result[1:] == (None, 2.0)


@pytest.mark.parametrize("way", ["non-strict", "strict", "loaded"])
def test_rows_123_124_125_126_127_preserved_conventions(way: str) -> None:
    """A preserved module is called alone with its own arguments: nested, unused, constant and None."""
    model = around()
    tree = tree_of(model, ARGS, KWARGS, way=way, preserved=PRESERVED)
    given = ((X, {"y": torch.ones(4)}), 2.0)
    found, expected = tree.inner(*given, unused=torch.zeros(2)), model.inner(*given, unused=torch.zeros(2))
    assert list(found) == list(expected)
    assert torch.equal(found["sum"], expected["sum"])
    assert (found["nothing"], found["scale"]) == (None, 2.0)
    assert torch.equal(tree.inner.linear(X), model.inner.linear(X))


@EVERY_WAY
def test_defect_7_identity_with_a_preserved_convention(way: str) -> None:
    """A module without operations can be preserved, and called."""
    tree = tree_of(around(), ARGS, KWARGS, way=way, preserved=("same",))
    assert tree.same(X) is X


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf(self.leaf(x))


class Leaf(nn.Module):
    empty: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.spare = nn.Parameter(torch.ones(2))
        self.register_buffer("empty", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@EVERY_WAY
def test_defect_1_preserved_module_called_twice(way: str) -> None:
    """What a twice-called preserved module does not use stays in its state dict, and eager's loads."""
    torch.manual_seed(0)
    model = Twice()
    tree = tree_of(model, (X,), way=way, preserved=("leaf",))
    tree.load_state_dict(model.state_dict())
    is_eager(tree, model, (X,))


def test_preserved_convention_that_decomposition_gets_wrong() -> None:
    """run_decompositions renames values in kept conventions wrongly; what the graph says is believed then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    tree = tree_of(model, (X,), way="decomposed", preserved=("1",))
    assert tree[1](X).shape == X.shape


class Takes(FlatArgsAdapter):
    """Makes what lies in a dict fit a positional argument."""

    def __init__(self, count: int = 1) -> None:
        self.count = count

    def adapt(
        self,
        target_spec: TreeSpec,
        input_spec: TreeSpec,
        input_args: list[Any],
        metadata: dict[str, Any] | None = None,
        obj: Any | None = None,
    ) -> list[Any]:
        return input_args[: self.count]


def test_row_131_adapter() -> None:
    """Another structure is a TypeError in words; with an adapter the call works."""
    program = exported(nn.ReLU(), (X,))
    with pytest.raises(TypeError, match="takes"):
        unflattened(program)(x={"a": X, "b": X})
    tree = unflattened(program, Takes())
    assert torch.equal(tree(x={"a": X, "b": X}), X.relu())
    assert torch.equal(tree(X), X.relu())
    with pytest.raises(whence.CallError, match="the adapter returned 2 values, and the program takes 1"):
        unflattened(program, Takes(2))(x={"a": X, "b": X})


def test_row_131_adapter_for_a_program() -> None:
    """A captured program takes an adapter as well."""
    program = whence.capture(nn.ReLU(), (X,))
    assert torch.equal(unflattened(program, Takes())(x={"a": X, "b": X}), X.relu())


@EVERY_WAY
def test_bad_calls_are_named(way: str) -> None:
    """Wrong sizes, ranks, dtypes, kinds, constants and keywords are refused, all at once and in words."""
    tree = unflattened(exported(around(), ARGS, KWARGS, way=way))
    with pytest.raises(whence.CallError) as caught:
        tree(torch.ones(3, 4), {"y": 5}, unused=torch.zeros(2, dtype=torch.int64))
    text = str(caught.value)
    assert "args[0] was f32[2, 4] at capture, is f32[3, 4]" in text
    assert "args[1]['y'] was a tensor f32[4] at capture, is 5" in text
    assert "kwargs['unused'] was f32[2] at capture, is i64[2]" in text
    assert isinstance(caught.value, (TypeError, ValueError, RuntimeError))
    with pytest.raises(whence.CallError, match="got an unexpected keyword argument 'q'"):
        tree(*ARGS, **KWARGS, q=1)
    with pytest.raises(whence.CallError, match="another structure"):
        tree(X, {"z": torch.ones(4)}, **KWARGS)


def test_never_called_module_says_so() -> None:
    """Calling a module that was never called says that it has nothing to run."""
    tree = unflattened(exported(nn.ModuleDict({"a": nn.Linear(4, 4)})["a"], (X,)))
    with pytest.raises(whence.CallError, match="too many positional arguments"):
        tree(X, X)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(whence.CallError, match="has no graph of its own"):
        unflattened(exported(Half(), (X,))).unused(X)


def test_joint_programs_are_refused() -> None:
    """A joint exported program is refused with the way to get a joint program."""
    joint = exported(Loss(), (X,))
    joint = _export_forward_backward(joint)
    for read in (whence.from_exported_program, whence.unflatten):
        with pytest.raises(whence.UnsupportedGraph, match="it holds a backward pass"):
            read(joint)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


def test_what_is_no_exported_program_is_refused() -> None:
    """Anything else is refused by its class."""
    with pytest.raises(
        whence.UnsupportedGraph, match=r"expected a torch\.export\.ExportedProgram, got Linear"
    ):
        unflattened(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_everything_wrong_is_said_at_once() -> None:
    """A signature that does not fit, and state that is missing, are one error."""
    program = exported(around(), ARGS, KWARGS)
    program.graph_signature.input_specs[-1].arg.name = "other"
    del program.state_dict["inner.linear.weight"]
    with pytest.raises(whence.UnsupportedGraph) as caught:
        unflattened(program)
    assert len(caught.value.faults) == 2


@BOTH_FRONTS
def test_spelling_of_inputs(way: str) -> None:
    """Inputs are found by the access that a person writes."""
    program = program_of(around(), ARGS, kwargs=KWARGS, way=way)
    assert program.input("args[1]['y']").name == "batch_y"
    assert program.input("kwargs['unused']").kind == "user"
    assert program.output("output[0]").node is not None


def test_a_file_gives_the_same_program() -> None:
    """What comes back from a file reads as the same program, node for node."""
    program = exported(around(), ARGS, KWARGS)
    one, other = whence.from_exported_program(program), whence.from_exported_program(loaded(program))
    assert str(one) == str(other)
    assert str(one.calls) == str(other.calls)
    assert [str(one.where(node)) for node in one.nodes()] == [
        str(other.where(node)) for node in other.nodes()
    ]
