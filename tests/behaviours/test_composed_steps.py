"""Training steps of models whose parameters are made of other tensors, and bound programs of such models."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

import whence
from whence.errors import StaleCapture, UnsupportedInput, UnsupportedStep, UsageError

Step = Callable[[Any], Any]
BATCHES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


class Scaled(nn.Module):
    """A buffer that counts, plain parameters, and draws, around layers of composed parameters."""

    steps: Tensor

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.drop, self.norm = layers, nn.Dropout(0.3), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        out: Tensor = self.norm(self.drop(self.layers(x))) / self.steps
        return out


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def parallel(mesh: Any) -> nn.Module:
    """By the plan of tensor parallelism, between plain layers."""
    return Scaled(parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def everywhere(mesh: Any) -> nn.Module:
    """Every parameter on each process."""
    return distribute_module(layers(), mesh)


def doubled(mesh: Any) -> nn.Module:
    """Every parameter is two tensors."""
    model = layers()
    for layer in (model[0], model[2]):
        for name, held in list(layer.named_parameters()):
            two = TwoTensor(held.detach(), held.detach() * 0.5)
            layer.register_parameter(name, nn.Parameter(two))
    return model


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def squares(model: nn.Module, x: Any) -> Tensor:
    return model(x).pow(2).mean()


def cleared_last(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Any) -> Any:
        loss = squares(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def cleared_first(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = squares(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def zeroed(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Any) -> Any:
        optimizer.zero_grad(set_to_none=False)
        squares(model, x).backward()
        optimizer.step()

    return step


def accumulated(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Any) -> Any:
        loss = squares(model, x)
        loss.backward()
        return loss.detach()

    return step


def in_halves(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Any) -> Any:
        for half in x.chunk(2):
            squares(model, half).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Any) -> Any:
        squares(model, x).backward()
        with torch.no_grad():
            for held in model.parameters():
                held.sub_(held.grad * 0.1)  # type: ignore[operator]
                held.grad = None

    return step


def scheduled(model: nn.Module, optimizer: Optimizer) -> Step:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step(x: Any) -> Any:
        squares(model, x).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def clipped(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Any) -> Any:
        squares(model, x).backward()
        norm: Any = clip_grad_norm_(model.parameters(), 0.01, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        return norm.full_tensor()

    return step


def sgd(held: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(held, lr=0.1, momentum=0.9)


def adam(held: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(held, lr=0.01, amsgrad=True)


def foreach(held: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(held, lr=0.01, foreach=True)


def fused(held: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(held, lr=0.01, fused=True)


def muon(held: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([each for each in held if each.ndim == 2], lr=0.01)


ROWS: list[tuple[Any, Any, Any]] = [
    *[(model, sgd, step) for model in (parallel, doubled) for step in (cleared_first, zeroed, in_halves)],
    *[
        (model, adam, step)
        for model in (parallel, doubled)
        for step in (cleared_last, accumulated, scheduled)
    ],
    *[(model, sgd, by_hand) for model in (parallel, everywhere, doubled)],
    *[(everywhere, optimizer, cleared_last) for optimizer in (foreach, fused, muon, torch.optim.Adagrad)],
    (everywhere, adam, clipped),
]


def named(row: Any) -> str:
    return "-".join(each.__name__ for each in row)


def parts(value: Any) -> list[Tensor]:
    """What a tensor is made of, or itself; nothing for no tensor."""
    if not isinstance(value, Tensor):
        return []
    names = value.__tensor_flatten__()[0] if isinstance(value, DTensor | TwoTensor) else []
    held = [getattr(value, name) for name in names]
    return [each for each in held if isinstance(each, Tensor)] or [value]


def alike(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor):
        return bool(left == right)
    return type(left) is type(right) and all(map(torch.equal, parts(left), parts(right)))


def held_by(model: nn.Module, optimizer: Optimizer) -> Iterator[Any]:
    """Parameters, buffers, gradients with their placements, and the optimizer's state, in order."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.detach()
        yield tensor.grad
        yield getattr(tensor.grad, "placements", None)
    for held in optimizer.state.values():
        yield from held.values()


@pytest.mark.parametrize("taken", [0, 2], ids=["first", "third"])
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_a_step_of_composed_parameters(row: Any, taken: int, mesh: Any, tmp_path: Path) -> None:
    """Bound, verified, and read from a file: parameters, gradients and state are eager's, part by part."""
    make, optimizers, steps = row

    def started() -> tuple[nn.Module, Optimizer, Step]:
        torch.manual_seed(0)
        model = make(mesh)
        optimizer = optimizers(list(model.parameters()))
        step = steps(model, optimizer)
        for x in batches[:taken]:
            step(x)
        return model, optimizer, step

    is_spread = make is everywhere
    batches: Any = [distribute_tensor(x, mesh, [Replicate()]) if is_spread else x for x in BATCHES]
    (model, optimizer, step), (twin, expected, eager) = started(), started()
    program = whence.capture_step(step, (batches[taken],), model=model, optimizer=optimizer)
    if steps is not accumulated and taken:
        assert program.verify(model, (batches[taken],)).ok
    bound = program.bind(model, optimizer)
    for x in batches[taken : taken + 3]:
        torch.manual_seed(1)
        found = bound(x)
        torch.manual_seed(1)
        assert alike(found, eager(x))
    pairs = zip(held_by(model, optimizer), held_by(twin, expected), strict=True)
    assert all(alike(*pair) for pair in pairs)
    if make is parallel and taken and steps is not scheduled:
        program.save(tmp_path / "p.whence")
        loaded = whence.load(tmp_path / "p.whence", model=model).bind(model, optimizer)
        torch.manual_seed(1)
        found = loaded(batches[0])
        torch.manual_seed(1)
        assert alike(found, eager(batches[0]))


@pytest.mark.parametrize("make", [parallel, everywhere])
def test_a_joint_program_is_bound(make: Any, mesh: Any) -> None:
    """Gradients are added to what is there, made as eager's are."""

    def loss(out: Any) -> Any:
        found = out.pow(2).mean()
        return found.full_tensor() if make is everywhere else found

    def started() -> nn.Module:
        torch.manual_seed(0)
        return make(mesh).eval()

    batches: Any = BATCHES[:2]
    if make is everywhere:
        batches = [distribute_tensor(x, mesh, [Replicate()]) for x in batches]
    model, twin = started(), started()
    bound = whence.capture(model, (batches[0],), backward=loss).bind(model)
    for x in batches:
        found, expected = bound(x)[0], loss(twin(x))
        expected.backward()
        assert torch.equal(found, expected)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(left.grad is not None and alike(left.grad, right.grad) for left, right in pairs)


def test_a_gradient_that_is_placed_otherwise(mesh: Any) -> None:
    """It is an input of the program, and how it is spread is part of that: the step is captured again."""

    def started() -> tuple[Any, Step]:
        torch.manual_seed(0)
        model = everywhere(mesh)
        step = accumulated(model, sgd(model.parameters()))
        step(x)
        return model, step

    x = distribute_tensor(BATCHES[0], mesh, [Replicate()])
    (model, step), (twin, eager) = started(), started()
    bound = whence.capture_step(step, (x,), model=model).bind(model)
    bound(x)
    eager(x)
    for held in (model, twin):
        weight = held[0].weight
        weight.grad = distribute_tensor(weight.grad.full_tensor(), mesh, [Shard(1)])
    assert alike(bound(x), eager(x))
    assert model[0].weight.grad.placements == twin[0].weight.grad.placements == (Shard(1),)
    assert alike(model[0].weight.grad, twin[0].weight.grad)


def test_state_that_is_placed_otherwise(mesh: Any) -> None:
    """How the optimizer's state is spread is part of the program, too."""

    def started() -> tuple[Any, Optimizer, Step]:
        torch.manual_seed(0)
        model = everywhere(mesh)
        optimizer = sgd(model.parameters())
        step = cleared_last(model, optimizer)
        step(x)
        return model, optimizer, step

    def moved(model: Any, optimizer: Optimizer) -> None:
        held = optimizer.state[model[0].weight]
        held["momentum_buffer"] = distribute_tensor(held["momentum_buffer"].full_tensor(), mesh, [Shard(1)])

    x = distribute_tensor(BATCHES[0], mesh, [Replicate()])
    (model, optimizer, step), (twin, expected, _) = started(), started()
    bound = whence.capture_step(step, (x,), model=model, optimizer=optimizer).bind(model, optimizer)
    moved(model, optimizer)
    moved(twin, expected)
    with pytest.raises(StaleCapture, match=r"momentum_buffer'\] is not what it was at capture"):
        bound(x)


class Beside(nn.Module):
    """A plain parameter whose gradient is of two tensors."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.inner, self.scale = doubled(mesh), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


@pytest.mark.parametrize("steps", [cleared_last, by_hand, in_halves])
def test_a_gradient_made_otherwise_that_is_cleared(steps: Any, mesh: Any) -> None:
    def started() -> tuple[nn.Module, Optimizer, Step]:
        torch.manual_seed(0)
        model = Beside(mesh)
        optimizer = sgd(model.parameters())
        return model, optimizer, steps(model, optimizer)

    (model, optimizer, step), (twin, expected, eager) = started(), started()
    bound = whence.capture_step(step, (BATCHES[0],), model=model, optimizer=optimizer).bind(model, optimizer)
    for x in BATCHES[:3]:
        assert alike(bound(x), eager(x))
    assert all(alike(*pair) for pair in zip(held_by(model, optimizer), held_by(twin, expected), strict=True))


@pytest.mark.parametrize("steps", [cleared_first, accumulated])
def test_a_gradient_made_otherwise_that_is_left(steps: Any, mesh: Any) -> None:
    model = Beside(mesh)
    optimizer = sgd(model.parameters())
    step = steps(model, optimizer)
    with pytest.raises(UnsupportedInput, match=r"scale, a plain tensor, is a TwoTensor[^$]*at its end"):
        whence.capture_step(step, (BATCHES[0],), model=model, optimizer=optimizer)
    assert all(each.grad is None for each in model.parameters())


class Doubling(TwoTensor):
    """Its class computes with the numbers that operations on it are given."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        twice = tuple(each * 2 if isinstance(each, float) else each for each in args)
        return super().__torch_dispatch__(func, types, twice, kwargs)


def test_a_class_that_computes_with_numbers(mesh: Any) -> None:
    """It would compute with what stands for a learning rate, which is a constant of the program then."""

    def started() -> tuple[Any, Optimizer, Step]:
        model = nn.Linear(4, 2, bias=False)
        held = torch.ones(2, 4)
        model.register_parameter("weight", nn.Parameter(Doubling(held, held.clone())))
        optimizer = sgd(model.parameters())

        def step(x: Tensor) -> None:
            squares(model, x).backward()
            with torch.no_grad():
                model.weight.copy_(torch.mul(model.weight, optimizer.param_groups[0]["lr"]))
            optimizer.zero_grad()

        return model, optimizer, step

    (model, optimizer, step), (twin, _, eager) = started(), started()
    bound = whence.capture_step(step, (BATCHES[0],), model=model, optimizer=optimizer).bind(model, optimizer)
    bound(BATCHES[0])
    eager(BATCHES[0])
    assert alike(model.weight.detach(), twin.weight.detach())
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StaleCapture, match=r"\['lr'\]` was 0.1 at capture, is 0.5 now"):
        bound(BATCHES[0])


def test_a_bound_argument_that_is_composed_and_requires_a_gradient(mesh: Any) -> None:
    model = everywhere(mesh)
    x = distribute_tensor(BATCHES[0], mesh, [Replicate()]).requires_grad_()
    program = whence.capture(model, (x,), backward=lambda out: out.to_local().sum())
    with pytest.raises(UsageError, match=r"args\[0\] requires a gradient, and is made of other tensors"):
        program.bind(model)


def test_a_step_of_what_fsdp_manages_is_refused(mesh: Any) -> None:
    model: Any = layers()
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model.parameters())
    step = cleared_last(model, optimizer)
    with pytest.raises(UnsupportedStep, match=r"FSDP manages \(root\) \(Sequential\)"):
        whence.capture_step(step, (BATCHES[0],), model=model, optimizer=optimizer)
