"""Objects that are no tensors among what a model holds (row 150), and weights moved in forward (row 146)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch.testing._internal.torchbind_impls import init_torchbind_implementations

import whence
from tests.checks import leaves_no_trace
from tests.releases import CONSTANT, OPAQUE, OpaqueBase, needs_script_classes
from tests.upstream.test_trees import EACH, Reader, X, captured, seeded


class Scripted(nn.Module):
    """Holds one of PyTorch's own script objects, and hands it to an operator, or calls its method."""

    def __init__(self, use: str) -> None:
        super().__init__()
        init_torchbind_implementations()
        self.use = use
        self.attr = torch.classes._TorchScriptTesting._Foo(10, 20)

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "operator":
            return x + torch.ops._TorchScriptTesting.takes_foo(self.attr, x)
        return x + self.attr.add_tensor(x) if self.use == "method" else x + 1


class Shift(OpaqueBase):  # type: ignore[misc]
    """An object that operators are given, and nobody looks into."""

    def __init__(self, by: float) -> None:
        self.by = by


class Factor(Shift):
    """One that is a constant."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Factor) and self.by == other.by

    def __hash__(self) -> int:
        return hash(self.by)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Factor({self.by})", {"Factor": Factor}


register_opaque_type(Shift, typ=OPAQUE)
register_opaque_type(Factor, typ=CONSTANT)
OPERATORS = torch.library.Library("whence_opaque", "FRAGMENT")
OPERATORS.define(f"shifted({get_opaque_type_name(Shift)} by, Tensor x) -> Tensor")
OPERATORS.impl("shifted", lambda by, x: x + by.by, "CompositeExplicitAutograd")
torch.library.register_fake("whence_opaque::shifted", lambda _, x: torch.empty_like(x), lib=OPERATORS)


class Shifts(nn.Module):
    def __init__(self, by: Shift) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.whence_opaque.shifted(self.by, x).sin()


READS_SCRIPT = r"forward reads attr, a ScriptObject, an object that is no tensor"
USED = [
    pytest.param(lambda: Scripted("operator"), READS_SCRIPT, marks=needs_script_classes),
    pytest.param(lambda: Scripted("method"), READS_SCRIPT, marks=needs_script_classes),
    (lambda: Shifts(Shift(2.0)), r"whence_opaque.shifted.default is given a Shift, an object that is no"),
]


@pytest.mark.parametrize(("make", "told"), USED, ids=["operator", "method", "opaque"])
def test_row_150_objects_in_use_are_refused(make: Callable[[], nn.Module], told: str) -> None:
    """What a graph cannot hold is refused where it is used, before it does anything."""
    with leaves_no_trace(model := make()), pytest.raises(whence.errors.UnsupportedInput, match=told):
        whence.capture(model, (X,))


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize(
    "make", [partial(Scripted, "operator"), partial(Scripted, "method"), lambda: Shifts(Shift(2.0))]
)
@needs_script_classes
def test_row_150_objects_of_an_export_are_held(make: Any, decomposed: bool) -> None:
    """Operators of an exported program are given the objects it holds; there is no way back to an export."""
    exported = torch.export.export(nn.Sequential(make()), (X,))
    program = whence.from_exported_program(exported.run_decompositions({}) if decomposed else exported)
    assert torch.equal(program.unflatten()(X), make()(X))
    assert torch.equal(program.module()(X), make()(X))
    with pytest.raises(whence.NotExportable, match=r"is given a (ScriptObject|Shift)"):
        program.to_exported_program()


class Printing(nn.Module):
    """Says something twice."""

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.aten._print("first")
        y = x + 1
        torch.ops.aten._print("second")
        return y


class Queued(nn.Module):
    """Puts two tensors into a queue, and takes one out."""

    def __init__(self) -> None:
        super().__init__()
        init_torchbind_implementations()
        self.queue = torch.classes._TorchScriptTesting._TensorQueue(torch.empty(0).fill_(-1))

    def forward(self, x: Tensor) -> Tensor:
        operators = torch.ops._TorchScriptTesting
        operators.queue_push(self.queue, x.sin())
        operators.queue_push(self.queue, x.cos())
        taken: Tensor = operators.queue_pop(self.queue)
        return taken + x


@needs_script_classes
def test_effects_keep_their_order_without_tokens(capfd: pytest.CaptureFixture[str]) -> None:
    """Tokens order what has effects in a decomposed export; a program has it where it ran."""
    exported = torch.export.export(nn.Sequential(Printing()), (X,)).run_decompositions({})
    capfd.readouterr()
    assert torch.equal(whence.unflatten(exported)(X), X + 1)
    assert capfd.readouterr().out.split() == ["first", "second"]
    exported = torch.export.export(nn.Sequential(Queued(), nn.ReLU()), (X,)).run_decompositions({})
    tree, model = whence.unflatten(exported), nn.Sequential(Queued(), nn.ReLU())
    assert [torch.equal(tree(X), model(X)) for _ in range(3)] == [True] * 3


@needs_script_classes
@EACH
def test_row_150_objects_that_are_not_used(read: Reader) -> None:
    """A script object that forward does not touch is no part of the program."""
    program = read(Scripted("nothing"), (X,))
    assert program.signature.state == ()
    assert torch.equal(program.unflatten()(X), X + 1)


@EACH
def test_row_150_opaque_constants(read: Reader) -> None:
    """An opaque object of a class registered as a value is a constant; another value is a broken guard."""
    model = Shifts(Factor(2.0))
    program = read(model, (X,))
    assert torch.equal(program.unflatten()(X), model(X))
    assert program.signature.state == ()
    if read is captured:
        model.by = Factor(3.0)
        assert program.check(model, (X,))


class Shared(nn.Module):
    """Two modules with one weight, which each moves to another dtype while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.linear(x.double(), self.embedding.weight.to(torch.float64))
        return wide @ self.head.weight.to(wide.dtype)


@EACH
def test_row_146_shared_weight_is_moved_in_forward(read: Reader) -> None:
    """Shared weights stay one, whatever dtype they are cast to while the model runs."""
    model = seeded(Shared)
    program = read(model, (X,))
    assert [row.path for row in program.signature.state] == ["embedding.weight"]
    tree = program.unflatten()
    assert torch.equal(tree(X), model(X))
    assert list(tree.state_dict()) == ["embedding.weight", "head.weight"]
    held = tree.state_dict(keep_vars=True)
    assert held["embedding.weight"] is held["head.weight"]


def test_row_146_shared_weight_trains() -> None:
    """Its gradient is the sum over both casts, on the meta device, too, where nothing is computed."""
    model = seeded(Shared)
    tree = whence.capture(model, (X,), backward=True).unflatten(copy=True)
    for module in (model, tree):
        module(X).sin().sum().backward()
    assert torch.equal(tree.get_parameter("head.weight").grad, model.head.weight.grad)  # type: ignore[arg-type]
    meta = seeded(Shared).to("meta")
    program = whence.capture(meta, (X.to("meta"),), backward=True)
    assert program.unflatten()(X.to("meta")).dtype == torch.float64
