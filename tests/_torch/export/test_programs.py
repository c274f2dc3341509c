"""Canaries for what torch.export keeps private."""

import pytest
import torch
from torch import fx, nn
from torch._export.verifier import Verifier
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from whence._torch.export import programs as exported
from whence._torch.export.programs import came_through, fakes_like, looks_into, ran_for, shares_storage
from whence._torch.operators.schemas import is_composite

aten = torch.ops.aten


@pytest.mark.canary("torch._export.verifier.Verifier")
def test_verifier_is_what_exported_programs_are_checked_by() -> None:
    """Decomposed programs name `Verifier`, and it accepts functional operators alone."""
    program = torch.export.export(nn.ReLU(), (torch.ones(2),)).run_decompositions({})
    assert program.verifiers == [Verifier] == [exported.Verifier]


@pytest.mark.canary("torch._export.verifier.SpecViolationError")
def test_what_the_verifier_raises() -> None:
    """`SpecViolationError` for a graph that calls all overloads of an operator at once."""
    program = torch.export.export(nn.ReLU(), (torch.ones(2),))
    (node,) = program.graph.find_nodes(op="call_function", target=aten.relu.default)
    node.target = aten.relu
    with pytest.raises(exported.SpecViolationError, match="relu"):
        program.validate()


@pytest.mark.canary("torch._C.DispatchKey.CompositeImplicitAutograd")
def test_what_schemas_say() -> None:
    """Composites are told from kernels, and schemas name the arguments that results may look into."""
    is_composite.cache_clear()  # another test may have asked
    assert is_composite(aten.linear.default)
    assert not is_composite(aten.mm.default)
    assert looks_into(aten.reshape.default) == (0,)
    assert looks_into(aten.add_.Tensor) == (0,)
    assert looks_into(aten.add.Tensor) == ()
    assert looks_into(len) == ()


@pytest.mark.canary(
    "torch._subclasses.fake_tensor.FakeTensor", "torch._subclasses.fake_tensor.FakeTensorMode"
)
def test_fakes_belong_together() -> None:
    """New fakes are of the mode of those that are there, or of a new FakeTensorMode."""
    mode = FakeTensorMode()
    known = mode.from_tensor(torch.ones(2))
    made = fakes_like([3, known])(torch.ones(5))
    assert isinstance(made, FakeTensor)
    assert made.fake_mode is mode
    assert isinstance(fakes_like([])(torch.ones(5)), FakeTensor)


def test_memory_is_told_apart() -> None:
    """Views share memory, copies do not, and sparse tensors are themselves."""
    whole = torch.ones(4)
    assert shares_storage(whole, whole[1:])
    assert not shares_storage(whole, whole.clone())
    sparse = whole.to_sparse()
    assert shares_storage(sparse, sparse)
    assert not shares_storage(sparse, whole.to_sparse())


@pytest.mark.canary("torch._ops.OpOverload._opname", "torch._ops.OpOverload._overloadname")
def test_what_a_decomposition_ran_is_known() -> None:
    """A decomposed graph is of another dialect, and its nodes name the operator that was run."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    program = torch.export.export(model, (torch.ones(1, 2),))
    decomposed = program.run_decompositions()
    assert (program.dialect, decomposed.dialect) == ("TRAINING", "ATEN")
    nodes = [node for node in decomposed.graph.nodes if node.op == "call_function"]
    linear, relu = ("aten.linear.default",), ("aten.relu.default",)
    assert [ran_for(node) for node in nodes] == [linear, linear, relu]
    assert [came_through(node) for node in nodes] == [False, False, True]
    again = [node for node in decomposed.run_decompositions({}).graph.nodes if node.op == "call_function"]
    assert ran_for(again[0]) == ("aten.permute.default", *linear)
    assert ran_for(fx.Graph().placeholder("x")) == ()
