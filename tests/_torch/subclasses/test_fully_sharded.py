"""Canaries: what FSDP keeps about the modules that it manages, and how a capture takes its place."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from whence._torch.fakes import FakeTensor, FakeTensorMode
from whence._torch.subclasses.fully_sharded import (
    besides_gathering,
    can_be_put_aside,
    class_as_written,
    is_of_sharding,
    is_part_of_a_group,
    is_sharded,
    lasting_parameters,
    name_of_class,
    processes_sharing,
    sharded_separately,
    sharding_kept,
    sharding_put_aside,
    whole,
)

X = torch.ones(2, 4)


def sharded() -> Any:
    """Two layers, the first with a group of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_ordinary_module() -> None:
    """A module that nobody sharded is as it was written."""
    module = nn.Linear(4, 4)
    assert not is_sharded(module)
    assert not can_be_put_aside(module)
    assert not is_part_of_a_group(module)
    assert class_as_written(nn.Linear) is nn.Linear
    assert processes_sharing(module) == 1
    assert besides_gathering(module) == []
    assert whole(module.weight) is module.weight
    with sharding_put_aside([module], FakeTensorMode()) as aside, sharding_kept([module]):
        assert aside == {}


@pytest.mark.canary(
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._orig_param_uid",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._all_reduce_hook",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._mp_policy",
    "torch.nn.Module._get_name",
)
def test_sharded_module(group: None) -> None:
    """`FSDPModule` is put before the class; what is inside without hooks of its own is marked."""
    model = sharded()
    assert [is_sharded(module) for module in model.modules()] == [True, True, False]
    assert [is_part_of_a_group(module) for module in model.modules()] == [True, True, True]
    assert class_as_written(type(model[0])) is nn.Linear
    assert name_of_class(model) == "Sequential"
    assert processes_sharing(model) == 1
    assert besides_gathering(model) == []
    assert sharded_separately(model.modules()) == []


def test_hooks_and_methods_of_fsdp(group: None) -> None:
    """Their code lies in FSDP's own folder, also behind what keeps them from the compiler."""
    model = sharded()
    model[0].register_forward_hook(print)
    register_fsdp_forward_method(model[0], "extra_repr")
    assert [is_of_sharding(hook) for hook in model[0]._forward_pre_hooks.values()] == [True]
    assert [is_of_sharding(hook) for hook in model[0]._forward_hooks.values()] == [True, False]
    assert is_of_sharding(vars(model[0])["extra_repr"])
    assert not is_of_sharding(model.forward)


@pytest.mark.canary(
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._setattr_on_modules",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._parameters",
)
def test_put_aside(group: None) -> None:
    """Class, hooks, methods and parameters are those before `fully_shard`, and afterwards those after it."""
    model = sharded()
    register_fsdp_forward_method(model[0], "extra_repr")
    before = [(type(module), dict(vars(module)), dict(module._parameters)) for module in model.modules()]
    shard = model[0].weight
    with sharding_put_aside([*model.modules()], FakeTensorMode()) as aside:
        assert type(model[0]) is nn.Linear
        assert not model[0]._forward_hooks
        assert model[0].extra_repr() == "in_features=4, out_features=4, bias=True"
        fake = model[0].weight
        assert isinstance(fake, FakeTensor)
        assert isinstance(fake, nn.Parameter)
        assert aside[id(fake)] is shard
    after = [(type(module), dict(vars(module)), dict(module._parameters)) for module in model.modules()]
    assert [row[0] for row in after] == [row[0] for row in before]
    assert [[*map(id, row[1].values())] for row in after] == [[*map(id, row[1].values())] for row in before]
    assert [[*map(id, row[2].values())] for row in after] == [[*map(id, row[2].values())] for row in before]


@pytest.mark.canary(
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._module_info",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups",
)
def test_lasting_parameters(group: None) -> None:
    """After a forward the root holds whole parameters, and FSDP keeps the shards."""
    model = sharded()
    shards = [*model.parameters()]
    assert lasting_parameters(model.modules()) == {}
    model(X)
    found = lasting_parameters(model.modules())
    assert [found.get(id(now), now) for now in model.parameters()] == shards
    assert not isinstance(model[1].weight, DTensor)


@pytest.mark.canary(
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._partial_reduce_output",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._state_ctx",
)
@pytest.mark.parametrize("was_whole", [False, True])
def test_fsdp_is_given_back(group: None, was_whole: bool) -> None:
    """Shards, or the same whole parameters, are registered as before; gradients that wait are waiting."""
    model = sharded()
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    model(X).sum().backward()
    waiting = [row.grad for row in (model.unshard(), *model.parameters())[1:]]
    if not was_whole:
        model.reshard()
    before = [*map(id, model.parameters())]
    with sharding_kept(model.modules()):
        model(X).sum().backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    assert [*map(id, model.parameters())] == before
    model[0].reshard()
    model.unshard()
    assert [*map(id, waiting[2:])] == [id(parameter.grad) for parameter in model[1].parameters()]


@pytest.mark.canary("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._is_root")
def test_an_iteration_that_fails_is_forgotten(group: None) -> None:
    """After an error inside the block the model runs as before: the root's iteration is begun anew."""
    model = sharded()
    with pytest.raises(ZeroDivisionError), sharding_kept(model.modules()):
        model(X)
        raise ZeroDivisionError
    model(X).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_whole_of_a_distributed_tensor(group: None) -> None:
    """The gradient comes back as a DTensor; where there is none, none; a write in between is noticed."""
    model = sharded()
    weight, bias = model[0].weight, model[0].bias
    total = whole(weight)
    assert not isinstance(total, DTensor)
    assert torch.equal(total, weight.detach().to_local())
    total.sum().backward()
    assert isinstance(weight.grad, DTensor)
    assert torch.equal(whole(weight.grad), torch.ones(4, 4))

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(_ctx: Any, _gradient: Any) -> Any:
            return None

    Nothing.apply(whole(bias)).sum().backward()
    assert bias.grad is None
    written = whole(weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written.backward()


@pytest.mark.canary("torch.distributed.fsdp.fully_shard._is_fsdp_managed_module")
def test_parallelized_module_is_no_sharded_one(group: None) -> None:
    """DTensors alone are not FSDP."""
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": RowwiseParallel()})
    assert not is_sharded(model[0])
    assert not is_part_of_a_group(model[0])


@pytest.mark.sweep
def test_questions_load_nothing() -> None:
    """Asking about FSDP imports neither it nor DTensor."""
    code = (
        "import sys; from torch import nn; from whence._torch.subclasses.fully_sharded import *;"
        "m = nn.Linear(2, 2); assert not is_sharded(m); assert lasting_parameters([m]) == {};"
        "assert whole(m.weight) is m.weight; assert not is_of_sharding(m.forward);"
        "assert not {'torch.distributed.fsdp', 'torch.distributed.tensor'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
