"""Programs of models that are spread over processes: files hold the tensors of one, and how they lie."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import whence
from whence.errors import StaleCapture, UsageError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))  # with which each row of a layer counts


def process(rank: int) -> None:
    """Be one of four processes."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())


@pytest.fixture
def world() -> Iterator[None]:
    """Four processes, of which this is one."""
    process(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def spread(mesh: Any, *, rows: bool = True) -> nn.Sequential:
    """Two layers by the plan of tensor parallelism over one axis; by columns alone without `rows`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(), **({"2": RowwiseParallel()} if rows else {})}
    found = parallelize_module(model, mesh, plan)
    assert isinstance(found, nn.Sequential)
    return found


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.pow(2).sum()


def saved(model: nn.Module, args: tuple[Any, ...], path: Path, **options: Any) -> whence.Program:
    program = whence.capture(model, args, **options)
    program.save(path)
    return program


def test_it_can_be_looked_at_without_processes(world: None, tmp_path: Path) -> None:
    """Its text, data, report and history are those that were saved; running it says what it needs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    program = saved(spread(mesh["tp"]), (X,), tmp_path / "p.whence", backward=squares)
    dist.destroy_process_group()
    after = whence.load(tmp_path / "p.whence")
    assert str(after) == str(program) and after.to_dict() == program.to_dict()
    assert str(after.report()) == str(program.report()) and after.diff(program).ok
    assert after.input("0.weight").part == program.input("0.weight").part
    row = after.to_dict()["inputs"][0]["part"]
    assert (row["whole"], row["mesh"], row["placements"]) == ("0.weight", {"tp": 2}, ["Shard(dim=0)"])
    for run in (after.module, after.unflatten, lambda: after.run((X,), read=["relu"])):
        with pytest.raises(UsageError, match="a mesh with the axes tp of 2"):
            run()
    after.save(tmp_path / "again.whence")
    assert whence.load(tmp_path / "again.whence").to_dict() == program.to_dict()


def test_it_runs_with_a_model_that_is_spread_alike(world: None, tmp_path: Path) -> None:
    """On that model's tensors, with eager's gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    saved(spread(mesh), (X,), tmp_path / "p.whence", backward=squares)
    model = spread(mesh)
    after = whence.load(tmp_path / "p.whence", model=model)
    after.module()(X)[0].backward()
    found = [each.grad for each in model.parameters()]
    model.zero_grad()
    squares(model(X)).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert isinstance(gradient, DTensor) and isinstance(parameter.grad, DTensor)
        assert gradient.placements == parameter.grad.placements
        assert torch.equal(gradient.to_local(), parameter.grad.to_local())


def test_a_model_that_is_spread_otherwise_is_refused(world: None, tmp_path: Path) -> None:
    """Over other processes, which the graph would not talk to, or with other placements, or not at all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    saved(spread(mesh["tp"]), (X,), tmp_path / "p.whence")
    others = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(
        StaleCapture, match=r"0.weight is _local_tensor of the DTensor 0.weight, .* \(of the groups"
    ):
        whence.load(tmp_path / "p.whence", model=spread(others["tp"]))
    with pytest.raises(StaleCapture, match="does not fit the model: 2"):
        whence.load(tmp_path / "p.whence", model=spread(mesh["tp"], rows=False))


@pytest.mark.parametrize("backward", [False, True, squares])
def test_guards_speak_of_how_it_is_spread(world: None, backward: Any, tmp_path: Path) -> None:
    """Placements and meshes, of parameters and of what the hooks hold, are compared by what they are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    program = saved(spread(mesh), (X,), tmp_path / "p.whence", backward=backward)
    model = spread(mesh)
    after = whence.load(tmp_path / "p.whence", model=model)
    assert str(after.guards) == str(program.guards)
    for each in (program, after):
        assert each.check(model, (X,)) == []
        assert {guard.guard.what for guard in each.check(spread(mesh, rows=False), (X,))} >= {"2.weight"}
    assert after.under(loss_function=program.loss_function).verify(model, (X,)).ok


RUN = """
import sys
import whence
from tests.interop.archive.test_saved_distributed import X, init_device_mesh, process, spread, squares
from whence import api

made, real = [], api.capture
api.capture = lambda *args, **kwargs: made.append(args) or real(*args, **kwargs)
process(int(sys.argv[2]))
model = spread(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"])
for backward in (False, squares):
    program = whence.cached(model, (X,), directory=sys.argv[1], backward=backward)
    assert program.check(model, (X,)) == []
    program.module()(X)
print(len(made))
try:
    whence.load(sys.argv[3], model=model)
except whence.StaleCapture as error:
    print(error)
"""


@pytest.mark.sweep
def test_other_runs_and_other_processes(world: None, tmp_path: Path) -> None:
    """What `whence.cached` kept in a run is used in the next one of that process. In another process it is
    not, nor does it load there: the graph has the part of one.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    saved(spread(mesh), (X,), tmp_path / "p.whence")

    def run(rank: int) -> list[str]:
        command = [sys.executable, "-c", RUN, str(tmp_path / "cache"), str(rank), str(tmp_path / "p.whence")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    assert (run(0), run(0)) == (["2"], ["0"])
    captures, refusal, *_ = run(1)
    assert captures == "2" and "at the place 1)" in refusal


def test_distributed_arguments_and_results(world: None, tmp_path: Path) -> None:
    """A result is spread as it was, over the mesh of the model; without one nothing runs."""
    mesh = init_device_mesh("cpu", (4,))
    model: Any = nn.Linear(4, 8)
    for name, held in [*model.named_parameters()]:
        model.register_parameter(name, nn.Parameter(distribute_tensor(held.detach(), mesh, [Shard(0)])))
    x = distribute_tensor(X, mesh, [Replicate()])
    saved(model, (x,), tmp_path / "p.whence")
    after = whence.load(tmp_path / "p.whence", model=model)
    assert after.verify(model, (x,)).ok
    result = after.module()(x)
    expected = model(x)
    assert isinstance(result, DTensor) and result.placements == expected.placements
    assert result.shape == expected.shape and torch.equal(result.to_local(), expected.to_local())
    alone = whence.load(tmp_path / "p.whence")
    with pytest.raises(UsageError, match="axes 0 of 4"):
        alone.module()


class Spreading(nn.Module):
    """Spreads what comes out, over a mesh that it holds."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> Any:
        return DTensor.from_local(x.sin(), self.mesh, [Shard(0)], run_check=False)


class Between(nn.Module):
    """Plain parameters, with a result that is spread and brought together again on the way."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.mesh = nn.Linear(4, 4), mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: Any = DTensor.from_local(self.layer(x), self.mesh, [Shard(0)], run_check=False)
        return (rows * 2).redistribute(placements=[Replicate()]).to_local()


def test_steps_with_distributed_values(world: None, tmp_path: Path) -> None:
    """A step of a model whose values are spread on the way runs from a file as eager does."""

    def made() -> tuple[Between, torch.optim.Optimizer, Any]:
        model = Between(init_device_mesh("cpu", (4,)))
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = squares(model(x))
            loss.backward()
            optimizer.step()
            return loss

        return model, optimizer, step

    model, optimizer, step = made()
    whence.capture_step(step, (X,), model=model, optimizer=optimizer).save(tmp_path / "p.whence")
    after = whence.load(tmp_path / "p.whence", model=model)
    assert after.check(model, (X,)) == []
    assert after.verify(model, (X,), optimizer=optimizer, step=step).ok
    run, (eager, _, expected) = after.bind(model, optimizer), made()
    for _ in range(2):
        assert torch.equal(run(X), expected(X))
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


def test_steps_of_distributed_parameters(world: None, tmp_path: Path) -> None:
    """What an optimizer does to a DTensor happens in its parts, which are inputs, as its state is."""
    model = spread(init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.Adam(model.parameters())
    before = [each.to_local().clone() for each in model.parameters()]  # type: ignore[attr-defined]

    def step(x: torch.Tensor) -> None:
        squares(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    assert all(map(torch.equal, before, (each.to_local() for each in model.parameters())))  # type: ignore[attr-defined]
    assert all(each.grad is None for each in model.parameters())
    step(X)
    program.save(tmp_path / "p.whence")
    shown = whence.load(tmp_path / "p.whence")
    assert str(shown.signature) == str(program.signature)
    held: Any = shown.input("optimizer.state['0.weight']['exp_avg']")
    assert held.part.placements == (repr(Shard(0)),) and held.of == "0.weight"
    with pytest.raises(whence.UsageError):
        shown.bind(model, optimizer)
    whence.load(tmp_path / "p.whence", model=model).bind(model, optimizer)(X)
    assert not any(map(torch.equal, before, (each.to_local() for each in model.parameters())))  # type: ignore[attr-defined]


@pytest.mark.parametrize("spreads", [True, False])
def test_what_could_not_run_is_not_kept(world: None, spreads: bool, tmp_path: Path) -> None:
    """`whence.cached` gives programs that run: it keeps them where parameters lead to the mesh."""
    mesh = init_device_mesh("cpu", (4,))
    model: nn.Module = Spreading(mesh) if spreads else spread(mesh)
    expected = model(X)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = whence.cached(model, (X,), directory=tmp_path).module()(X)
        assert isinstance(result, DTensor) is spreads and result.shape == expected.shape
        told = [str(each.message) for each in caught]
        assert any("a mesh of 0 of 4" in text for text in told) is spreads
