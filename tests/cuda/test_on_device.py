"""Ten architectures captured and run where they are, bit for bit as eager mode; on the CPU everywhere."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import differing, gradients
from tests.cuda.architectures import ARCHITECTURES, Pinned
from tests.cuda.devices import DEVICES, deterministic, first_tensor, made_on, mean_sine, random_states
from whence.demo import GPT, GPTConfig, next_token_loss
from whence.errors import WhenceError

BACKWARDS: dict[str, Any] = {"forward": False, "tangents": True, "loss": mean_sine}
Run = Callable[..., Any]


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_captured_there_is_verified(device: str, name: str, training: bool, backward: str) -> None:
    """Outputs, gradients, buffers and random states, with kernels that are deterministic."""
    if (name, training, device) == ("recurrent", False, "cuda") and backward != "forward":
        pytest.skip("cuDNN differentiates recurrent networks in training alone, in eager mode too")
    model, args, kwargs = made_on(device, name, training=training)
    with deterministic():
        program = whence.capture(model, args, kwargs, backward=BACKWARDS[backward])
        result = program.verify(model, args, kwargs)
        assert result.ok, str(result)
        assert program.check(model, args, kwargs) == []


def trained(run: Run, model: nn.Module, given: tuple[Any, Any], device: str) -> dict[str, Any]:
    """What a forward and a backward give and leave behind, by name."""
    torch.manual_seed(7)
    result = first_tensor(run(*given[0], **given[1]))
    mean_sine(result).backward()
    states = {f"random state {number}": held for number, held in enumerate(random_states(device))}
    buffers = {f"buffer {name}": held for name, held in model.named_buffers()}
    return {"output": result.detach(), **gradients(model), **buffers, **states}


@pytest.mark.parametrize("way", ["module", "unflatten"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_module_trains_as_the_model(device: str, name: str, backward: bool, way: str) -> None:
    """With the kernels that are taken by default; where eager mode agrees with itself over three runs."""
    runs = [made_on(device, name, training=True) for _ in range(4)]
    eager = [trained(model, model, (args, kwargs), device) for model, args, kwargs in runs[:3]]
    model, args, kwargs = runs[3]
    program = whence.capture(model, args, kwargs, backward=backward)
    ours = trained(getattr(program, way)(), model, (args, kwargs), device)
    unsteady = {name for other in eager[1:] for name in differing(eager[0], other)}
    assert set(differing(eager[0], ours)) <= unsteady


class Dropping(nn.Module):
    """Dropout in and out of attention, and in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def attended(self, x: Tensor) -> Tensor:
        heads = self.into(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, None, 0.25 if self.training else 0.0)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)

    def forward(self, x: Tensor) -> Tensor:
        kept: Any = checkpoint(self.attended, x, use_reentrant=False)
        return kept + F.dropout1d(self.attended(x), 0.5, self.training) + torch.rand_like(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_are_drawn_as_there(device: str, backward: str, dtype: torch.dtype) -> None:
    """Offsets of the generator move as in eager mode, also in what a checkpoint runs again."""
    model = Dropping().to(device, dtype)
    x = torch.randn(2, 8, 16, device=device, dtype=dtype)
    program = whence.capture(model, (x,), backward=BACKWARDS[backward])
    for _ in range(2):
        result = program.verify(model, (x,))
        assert result.ok, str(result)


class Autocast(nn.Module):
    """A region of another dtype, with sums that stay in float32."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.kind, self.dtype):
            y = self.layers(x)
            return (y @ y.mT).softmax(-1).sum(-1) + y.float().pow(2).mean(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("device", DEVICES)
def test_casts_are_those_of_the_device(device: str, backward: str, dtype: torch.dtype) -> None:
    """Autocast in the model, and around it."""
    model, x = Autocast(device, dtype).to(device), torch.randn(4, 8, 16, device=device)
    assert (result := whence.capture(model, (x,), backward=BACKWARDS[backward]).verify(model, (x,))).ok, (
        result
    )
    plain = model.layers
    with torch.autocast(device, dtype):
        program = whence.capture(plain, (x,), backward=BACKWARDS[backward])
        assert (result := program.verify(plain, (x,))).ok, result


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("device", DEVICES)
def test_channels_last_stays(device: str, backward: str) -> None:
    """Of inputs, weights and results."""
    model, args, _ = made_on(device, "residual", training=True)
    x = args[0].to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with deterministic():
        program = whence.capture(model, (x,), backward=BACKWARDS[backward])
        result = program.verify(model, (x,))
    assert result.ok, str(result)
    first: Any = model.first
    assert whence.capture(first, (x,)).module()(x).stride() == first(x).stride()


class TwoPlaces(nn.Module):
    """A table on the CPU, a head on the device, copies that do not wait."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 4, device=device)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, ids: Tensor) -> Tensor:
        rows = (self.table(ids) + self.shift).to(self.device, non_blocking=True)
        return self.head(rows).cpu() * 2


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("device", DEVICES)
def test_one_model_on_two_devices(device: str, backward: str) -> None:
    """And back on the CPU."""
    model, ids = TwoPlaces(device), torch.arange(8)[None]
    program = whence.capture(model, (ids,), backward=BACKWARDS[backward])
    assert (result := program.verify(model, (ids,))).ok, result


class Streaming(nn.Module):
    """Half of the work on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = self.lin(x)
        torch.cuda.current_stream().wait_stream(side)
        return y + x


class Synchronizing(nn.Module):
    """Waits for the device, and looks at how much of it is used."""

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return x * 2 if torch.cuda.memory_allocated() > 0 else x


@pytest.mark.parametrize("kind", [Pinned, Streaming, Synchronizing])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_work_of_the_host_is_recorded_or_refused(device: str, backward: str, kind: Any) -> None:
    """In the order in which it comes; what cannot be recorded says so in words."""
    model, x = kind().to(device), torch.randn(4, 8, device=device, requires_grad=True)
    try:
        program = whence.capture(model, (x,), backward=BACKWARDS[backward])
    except WhenceError as error:
        pytest.skip(f"refused: {error}"[:900])
    assert (result := program.verify(model, (x,))).ok, result


@pytest.mark.parametrize("device", DEVICES)
def test_a_program_moves_there(device: str) -> None:
    """A forward of the CPU is that of the device."""
    model = GPT(GPTConfig(16, 8, 16, 2, 2))
    ids = torch.arange(8)[None]
    program = whence.capture(model, (ids,))
    there = copy.deepcopy(model).to(device)
    moved = program.to(device)
    result = moved.verify(there, (ids.to(device),))
    assert result.ok, str(result)


@pytest.mark.parametrize("device", DEVICES)
def test_files_keep_the_device(device: str, tmp_path: Any) -> None:
    """Saved there and loaded there."""
    model, ids = GPT(GPTConfig(16, 8, 16, 2, 2)).to(device), torch.arange(8, device=device)[None]
    program = whence.capture(model, (ids,), backward=next_token_loss)
    program.save(tmp_path / "gpt.whence")
    again = whence.load(tmp_path / "gpt.whence")
    assert again.input("blocks.0.mlp.up.weight").value.device.type == device
    theirs = program.module()(ids)
    ours = again.module()(ids)
    assert torch.equal(ours[0], theirs[0])
