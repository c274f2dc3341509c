"""Models whose parameters FSDP manages are captured as the models they were made from."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrizations

import whence
from tests.checks import surroundings
from tests.models import case
from tests.upstream.checks import call_sites, equal, hooks, names

X = torch.randn(3, 4)
Backward = bool | Callable[[Any], Tensor]


def mean(outputs: Any) -> Any:
    """A loss."""
    return (outputs if isinstance(outputs, Tensor) else outputs.logits).square().mean()


BACKWARDS = pytest.mark.parametrize("backward", [False, True, mean], ids=["forward", "tangents", "loss"])


class Net(nn.Module):
    """Buffers that are written, a frozen parameter, one that is not used, a tie, and a hook of the user."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.again = nn.Linear(8, 4)
        self.again.weight = self.down.weight
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(8))
        self.norm.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(x)).relu() * self.scale
        return self.down(x) + self.again(x)


def sharded(model: Any, *parts: str, processes: int = 1, **options: Any) -> Any:
    """The model with `fully_shard` called on these parts and on itself."""
    mesh = init_device_mesh("cpu", (processes,))
    for module in (*map(model.get_submodule, parts), model):
        fully_shard(module, mesh=mesh, **options)
    return model


def net(**options: Any) -> Any:
    return sharded(Net(), "up", "norm", **options)


def held(model: nn.Module) -> dict[str, Any]:
    """What every module is and holds, by identity."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[path] = (type(module), {name: id(value) for name, value in vars(module).items()})
        for name, table in vars(module).items():
            if isinstance(table, dict):
                found[f"{path} {name}"] = [*map(id, table), *map(id, table.values())]
    return found


def bits(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {name: full(tensor).clone() for name, tensor in model.state_dict().items()}


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grads(model: nn.Module) -> dict[str, Any]:
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


def look_whole(model: Any) -> None:
    """Call the model without a backward: FSDP leaves the parameters of the root gathered."""
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad():
        model.eval()(X)
    for module, training in modes.items():
        module.training = training
    assert not isinstance(model.down.weight, DTensor)


def described(program: whence.Program) -> list[str]:
    """Everything that a program says of its nodes."""
    return [f"{node.format_node()} {program.where(node)}" for node in program.graph.nodes]


# --- the same program --------------------------------------------------------------------------------


@BACKWARDS
def test_program_is_that_of_the_model_before(group: None, backward: Backward) -> None:
    """Operations, names, origins, calls and types are those of the model before `fully_shard`."""
    plain = whence.capture(Net(), (X,), backward=backward)
    model = net()
    before, around = held(model), surroundings()
    program = whence.capture(model, (X,), backward=backward)
    assert held(model) == before
    assert surroundings() == around
    assert described(program) == described(plain)
    assert str(program) == str(plain)
    assert str(program.signature) == str(plain.signature)
    assert program.input("up.weight").module_type == "Linear"
    assert [str(call) for call in program.calls] == [str(call) for call in plain.calls]
    assert program.modules == plain.modules
    assert hooks(program) == hooks(plain)
    assert all(isinstance(program.state[name], DTensor) for name in names(program, "parameter"))


@pytest.mark.sample(1)
@BACKWARDS
def test_language_model(group: None, backward: Backward) -> None:
    """A Llama that is sharded layer by layer has the program of the plain one, bit for bit its results."""
    plain, args, kwargs = case("llama").make()
    expected = whence.capture(plain, args, kwargs, backward=backward)
    model, args, kwargs = case("llama").make()
    sharded(model, "model.layers.0", "model.layers.1")
    program = whence.capture(model, args, kwargs, backward=backward)
    assert described(program) == described(expected)
    assert str(program.signature) == str(expected.signature)
    result = program.verify(model, args, kwargs)
    assert result.ok, str(result)
    assert len([row for row in result.rows if row.kind == "gradient"]) == len(list(model.parameters()))
    assert program.check(model, args, kwargs) == []


@BACKWARDS
def test_verify_runs_fsdp_and_gives_the_model_back(group: None, backward: Backward) -> None:
    """Outputs, gradients and buffers are those of FSDP in eager; shards or whole, the model is as before."""
    model = net()
    program = whence.capture(model, (X,), backward=backward)
    values = bits(model)
    for prepare in (lambda _: None, look_whole):
        prepare(model)
        before = held(model)
        result = program.verify(model, (X,))
        assert result.ok, str(result)
        assert {"output", "gradient", "state"} < {row.kind for row in result.rows}
        assert held(model) == before
        assert equal(bits(model), values)
        assert set(grads(model).values()) == {None}


def test_verify_notices_a_difference(group: None) -> None:
    """With another computation than that of the program the comparison fails, and names the module."""
    model = net()
    program = whence.capture(model, (X,), backward=True)
    model.norm.eps = 0.5
    result = program.verify(model, (X,))
    assert not result.ok
    assert result.divergence is not None
    assert result.divergence.startswith("norm (BatchNorm1d)")


def test_verify_of_an_error_leaves_fsdp_ready(group: None) -> None:
    """When the model raises in eager, FSDP is not left in the middle of an iteration."""

    class Failing(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            result = self.down(self.up(x))
            if self.fails:
                raise ValueError("as asked")
            return result

    model = sharded(Failing(), "up", "norm")
    program = whence.capture(model, (X,), backward=True)
    program.verify(model, (X,))
    model.fails = True
    with pytest.raises(ValueError, match="as asked"):
        program.verify(model, (X,))
    model.fails = False
    assert program.verify(model, (X,)).ok


def test_gradients_that_wait_are_kept(group: None) -> None:
    """Gradients that FSDP accumulates over several backwards stay what they are."""
    model = net()
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    model(X).sum().backward()
    assert program_and_result(model).ok
    model.set_requires_gradient_sync(requires_gradient_sync=True)
    model(X).sum().backward()
    expected = net()
    for _ in range(2):
        expected(X).sum().backward()
    assert equal(grads(model), grads(expected))


def program_and_result(model: nn.Module) -> whence.Verification:
    return whence.capture(model, (X,), backward=True).verify(model, (X,))


def test_captured_while_it_is_whole(group: None) -> None:
    """After an evaluation FSDP leaves parameters whole: the program holds the shards all the same."""
    model = net()
    look_whole(model)
    before = held(model)
    program = whence.capture(model, (X,), backward=True)
    assert held(model) == before
    assert all(isinstance(program.state[name], DTensor) for name in names(program, "parameter"))
    assert program.check(model, (X,)) == []
    assert program.verify(model, (X,)).ok
    model.reshard()
    assert program.check(model, (X,)) == []
    assert program.state["p_unused"] is model.unused


def test_captured_before_it_is_sharded(group: None) -> None:
    """A program that was captured first stands for the sharded model too; its guards say what changed."""
    model: Any = Net()
    program = whence.capture(model, (X,), backward=True)
    sharded(model, "up", "norm")
    assert program.verify(model, (X,)).ok
    found = program.check(model, (X,))
    assert {row.guard.kind for row in found} == {whence.GuardKind.PARAMETER}
    assert {row.found.split()[0] for row in found} == {"DTensor"}


# --- running -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["module", "unflatten"])
@BACKWARDS
def test_training_what_was_captured_trains_the_model(group: None, backward: Backward, make: str) -> None:
    """Gradients arrive at the shards as DTensors, none where eager has none; a step gives the same bits."""
    model, expected = net(), net()
    runs = getattr(whence.capture(model, (X,), backward=backward), make)()
    optimizer = torch.optim.SGD(runs.parameters(), lr=0.1)
    eager = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        eager.zero_grad()
        loss = runs(X)[0] if backward is mean else mean(runs(X))
        wanted = mean(expected(X))
        loss.backward()
        wanted.backward()
        assert equal(loss, wanted)
        assert equal(grads(model), grads(expected))
        assert isinstance(model.up.weight.grad, DTensor)
        assert model.unused.grad is None
        optimizer.step()
        eager.step()
    assert equal(bits(model), bits(expected))
    assert list(runs.state_dict()) == list(model.state_dict())


def test_parameter_that_changes_before_the_backward(group: None) -> None:
    """A shard that is written between forward and backward is noticed, as on any parameter."""
    model = net()
    loss = whence.capture(model, (X,), backward=True).module()(X).sum()
    with torch.no_grad():
        model.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copy_is_apart(group: None) -> None:
    """With `copy=True` the program's modules have shards of their own."""
    model = net()
    values = bits(model)
    runs = whence.capture(model, (X,)).unflatten(copy=True)
    with torch.no_grad():
        runs.get_parameter("up.weight").mul_(2)
    assert equal(bits(model), values)


def test_guarded_follows_the_shards(group: None) -> None:
    """A guarded program runs before and after training steps, with parameters sharded or whole."""
    model, expected = net(), net()
    guarded = whence.capture(model, (X,)).guarded(model)
    for _ in range(2):
        assert equal(guarded(X), expected(X))
        look_whole(model)
        expected(X)
        guarded(X).sum().backward()
        assert isinstance(model.down.weight, nn.Parameter)
        model.reshard()
        assert isinstance(model.down.weight.grad, DTensor)
        model.norm.load_state_dict(expected.norm.state_dict())


def test_state_as_attributes(group: None) -> None:
    """The other view of the state runs, too."""
    model = net()
    program = whence.capture(model, (X,), backward=True, state="attributes")
    assert program.verify(model, (X,)).ok


# --- other ways to shard -----------------------------------------------------------------------------


def test_modules_in_one_group(group: None) -> None:
    """Modules that `fully_shard` groups are seen through, and a part of a group alone as well."""
    model: Any = Net()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard([model.up, model.norm], mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = held(model)
    program = whence.capture(model, (X,), backward=True)
    assert held(model) == before
    assert described(program) == described(whence.capture(Net(), (X,), backward=True))
    assert program.verify(model, (X,)).ok


@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_modules_that_hold_parameters_twice(group: None) -> None:
    """A recurrent module keeps a list of its weights, a parametrized one makes a class of its own."""
    model: Any = nn.Sequential(nn.LSTM(4, 4), nn.Identity())
    sharded(model, "0")
    before = [id(weight) for weight in model[0]._flat_weights]
    program = whence.capture(model[0], (X,), backward=True)
    assert [id(weight) for weight in model[0]._flat_weights] == before
    assert program.calls.program.site.type == "LSTM"
    normed = sharded(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()), "0")
    program = whence.capture(normed, (X,), backward=True)
    assert program.check(normed, (X,)) == []
    assert program.verify(normed, (X,)).ok


def test_methods_that_fsdp_wraps(group: None) -> None:
    """A method that was registered with FSDP is captured as the method it was."""

    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.part = nn.Linear(4, 4), nn.Linear(4, 4)

        def encode(self, x: Tensor) -> Any:
            return self.up(x)

        def forward(self, x: Tensor) -> Any:
            return self.part(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Encoding()

        def forward(self, x: Tensor) -> Any:
            return self.inner.encode(x) + self.inner(x)

    model = sharded(Outer(), "inner")
    register_fsdp_forward_method(model.inner, "encode")
    before = held(model)
    program = whence.capture(model, (X,), backward=True)
    assert held(model) == before
    assert call_sites(program) == ["", "inner.up", "inner", "inner.part"]
    assert program.check(model, (X,)) == []
    assert program.verify(model, (X,)).ok


def test_functions_and_methods_around_a_sharded_model(group: None) -> None:
    """A function that calls a sharded model knows it by the variable, its parts by their classes."""
    model = net()

    def twice(x: Tensor) -> Any:
        return model(x) * 2

    program = whence.capture(twice, (X,), backward=True)
    assert [call.site.type for call in program.calls][:2] == ["Net", "Linear"]
    assert program.check(twice, (X,)) == []
    assert program.verify(twice, (X,)).ok


def test_model_without_numbers(group: None) -> None:
    """A model on the meta device is sharded and captured, and nothing is computed."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    sharded(model, "0")
    program = whence.capture(model, (X.to("meta"),), backward=True)
    assert program.input("0.weight").value.device.type == "meta"


def test_frozen_and_ignored_parameters(group: None) -> None:
    """A parameter that FSDP ignores stays a plain one."""
    model: Any = Net()
    sharded(model, ignored_params={model.scale})
    program = whence.capture(model, (X,), backward=True)
    assert program.state["p_scale"] is model.scale
    assert program.verify(model, (X,)).ok


# --- refused -----------------------------------------------------------------------------------------


def refusal(model: Any, backward: Backward = True) -> whence.UnsupportedModule:
    before = held(model)
    with pytest.raises(whence.UnsupportedModule) as caught:
        whence.capture(model, (X,), backward=backward)
    assert held(model) == before
    return caught.value


def test_policies_that_cast_are_refused(group: None) -> None:
    """Every module whose policy casts is named with what it does."""
    bfloat = torch.bfloat16
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    policies = (
        MixedPrecisionPolicy(param_dtype=bfloat),
        MixedPrecisionPolicy(output_dtype=bfloat, reduce_dtype=bfloat),
        MixedPrecisionPolicy(),
    )
    for layer, policy in zip(model, policies, strict=True):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    error = refusal(model, backward=False)
    assert error.what.split("; ") == [
        "FSDP does more than gather parameters in 0 (Linear): it casts to torch.bfloat16",
        "FSDP does more than gather parameters in 1 (Linear): it casts outputs to torch.bfloat16, reduces "
        "gradients in torch.bfloat16",
    ]
    assert "before fully_shard" in error.remedy


def test_policy_that_changes_nothing_is_no_reason(group: None) -> None:
    """A policy in the dtype of the parameters casts nothing, when it leaves inputs alone."""
    whole = torch.float32
    policy = MixedPrecisionPolicy(param_dtype=whole, reduce_dtype=whole, cast_forward_inputs=False)
    model = net(mp_policy=policy)
    assert program_and_result(model).ok


def offloaded(_model: Any) -> Any:
    return net(offload_policy=CPUOffloadPolicy(pin_memory=False))


def divided(model: Any) -> Any:
    model.set_gradient_divide_factor(2.0)
    return model


def filled(model: Any) -> Any:
    model.set_reduce_scatter_unused_params(True)
    return model


def replaced(model: Any) -> Any:
    model.down.weight = nn.Parameter(torch.rand(4, 8))
    return model


def distributed(_model: Any) -> Any:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tensor"]))
    return fully_shard(model, mesh=mesh["data"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (offloaded, "moves parameters (CPUOffloadPolicy)"),
        (divided, "divides gradients by 2.0"),
        (filled, "makes gradients for unused parameters"),
        (replaced, "no longer knows the parameter weight, which was replaced"),
        (distributed, "shards parameters that were distributed before"),
    ],
)
def test_what_else_fsdp_does_is_refused(group: None, change: Callable[[Any], Any], words: str) -> None:
    """Whatever changes parameters or gradients is refused and said."""
    assert f": it {words}" in refusal(change(net())).what


def test_averaged_gradients_are_refused(group_of_two: None) -> None:
    """A backward over several processes is refused; the forward is captured, and cannot be differentiated."""
    model = net(processes=2)
    error = refusal(model)
    assert error.what == (
        "gradients are averaged by FSDP in (root) (Net) over 2 processes, up (Linear) over 2 processes, "
        "norm (BatchNorm1d) over 2 processes"
    )
    assert "average the gradients" in error.remedy
    plain = whence.capture(Net(), (X,))
    program = whence.capture(model, (X,))
    assert described(program) == described(plain)
    assert "gradient" not in {row.kind for row in program.verify(model, (X,)).rows}
    result = program.module()(X)
    assert result.shape == (3, 4)
    with pytest.raises(whence.NotDifferentiable) as caught:
        result.sum().backward()
    assert "FSDP's averaging of gradients over 2 processes" in caught.value.why


def test_part_whose_parameters_a_module_above_gathers(group: None) -> None:
    """A part that FSDP manages from above cannot be captured alone, sharded or whole."""
    model = net()
    for prepare in (lambda _: None, look_whole):
        prepare(model)
        error = refusal(model.down)
        assert error.what == "FSDP manages (root) (Linear) for a module above it"
        assert "that fully_shard was called on" in error.remedy
    assert whence.capture(model.up, (X,), backward=True).verify(model.up, (X,)).ok


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_old_fsdp_is_refused(group: None) -> None:
    """`FullyShardedDataParallel` is another thing."""
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    error = refusal(model)
    assert error.what == "FSDP manages (root) (FullyShardedDataParallel)"


def test_class_made_of_a_sharded_one_is_refused(group: None) -> None:
    """What was made of a sharded module's class later is not put aside."""
    model = net()

    class Later(type(model.up)):  # type: ignore[misc]
        pass

    model.up.__class__ = Later
    assert refusal(model).what == "FSDP manages up (Later)"


def test_methods_by_themselves_are_refused(group: None) -> None:
    """Eager runs a method without gathering, so that there is nothing to compare with; a call is a call."""
    model = net()
    for registered in (False, True):
        if registered:
            register_fsdp_forward_method(model, "forward")
        with pytest.raises(whence.UnsupportedModule) as caught:
            whence.capture(model.forward, (X,))
        assert caught.value.what == "Net.forward is a method of a module that FSDP manages"
    model = net()
    assert whence.capture(model.__call__, (X,), backward=True).verify(model, (X,)).ok


def test_ties_that_fsdp_cuts_are_refused(group: None) -> None:
    """A tied parameter in two groups is two parameters, which FSDP does not run either."""
    model = sharded(Net(), "down")
    assert refusal(model).what == "FSDP sharded tied parameters apart: weight"
    with pytest.raises(ValueError, match="already managed by another FSDP group"):
        model(X)


class Writing(nn.Module):
    """Writes a parameter, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Any:
        if self.way == "data":
            self.weight.data = self.weight.data * 2
        else:
            with torch.no_grad():
                self.weight.mul_(2)
        return x * self.weight


@pytest.mark.parametrize("way", ["data", "place"])
def test_written_parameters_are_refused(group: None, way: str) -> None:
    """A parameter that the model writes is gathered in eager, and the write is lost: refused."""
    model = sharded(nn.Sequential(Writing(way), nn.Tanh()), "0")
    before = held(model)
    with pytest.raises(whence.UnsupportedMutation) as caught:
        whence.capture(model, (X,))
    assert caught.value.where.module == "0"
    assert held(model) == before


def test_gradient_hooks_on_shards_are_refused(group: None) -> None:
    """A hook on a shard is one on a parameter."""
    model = net()
    model.up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(whence.UnsupportedHook, match=r"up\.weight"):
        whence.capture(model, (X,), backward=True)


def test_shards_that_somebody_kept_are_refused(group: None) -> None:
    """A shard that the model's code reaches past FSDP is one in eager, too: refused where it is used."""
    model = net()
    shard = model.up.weight

    def outside(x: Tensor) -> Any:
        return model(x) * shard.sum()

    with pytest.raises(whence.UnsupportedInput, match="a DTensor that requires a gradient"):
        whence.capture(outside, (X,))


def test_error_of_the_model_puts_everything_back(group: None) -> None:
    """A model that raises in the capture is sharded as before."""
    model = net()
    before = held(model)
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        whence.capture(model, (torch.randn(3, 5),))
    assert held(model) == before
    assert isinstance(model.up, FSDPModule)
    assert program_and_result(model).ok


def test_copies_of_the_plain_model_are_as_good(group: None) -> None:
    """A program of the sharded model is checked against, and verified on, a plain one."""
    plain = Net()
    program = whence.capture(net(), (X,), backward=True)
    other = copy.deepcopy(plain)
    assert [row for row in program.check(other, (X,)) if row.guard.kind is whence.GuardKind.PARAMETER] == []
    assert program.verify(other, (X,)).ok
