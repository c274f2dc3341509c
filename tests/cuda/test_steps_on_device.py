"""Whole training steps where the model is: optimizers, scaled gradients, graphs of CUDA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

import whence
from tests.checks import differing
from tests.cuda.devices import DEVICES, deterministic
from whence.demo import GPT, GPTConfig, next_token_loss

Made = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "adamw": lambda held: AdamW(held, lr=0.01),
    "adamw fused": lambda held: AdamW(held, lr=0.01, fused=True),
    "adamw one by one": lambda held: AdamW(held, lr=0.01, foreach=False),
    "adam amsgrad": lambda held: Adam(held, lr=0.01, amsgrad=True),
    "sgd": lambda held: SGD(held, lr=0.01),
    "sgd momentum": lambda held: SGD(held, lr=0.01, momentum=0.9, nesterov=True),
    "sgd fused": lambda held: SGD(held, lr=0.01, momentum=0.9, fused=True),
    "rmsprop": lambda held: RMSprop(held, lr=0.01, momentum=0.5),
    "adagrad": lambda held: Adagrad(held, lr=0.01),
    "nadam": lambda held: NAdam(held, lr=0.01),
}
CAPTURABLE: dict[str, Made] = {
    "adamw capturable": lambda held: AdamW(held, lr=0.01, capturable=True),
    "adamw fused capturable": lambda held: AdamW(held, lr=0.01, fused=True, capturable=True),
    "adamw one by one capturable": lambda held: AdamW(held, lr=0.01, foreach=False, capturable=True),
    "nadam capturable": lambda held: NAdam(held, lr=0.01, capturable=True),
}


def small(device: str, make: Made) -> tuple[nn.Module, Optimizer, Tensor]:
    """A GPT with its optimizer and a batch; the same bits at every call."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 8, 16, 2, 2)).to(device)
    return model, make(model.parameters()), torch.arange(8, device=device)[None]


def plain(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    def step(ids: Tensor) -> Tensor:
        loss = next_token_loss(model(ids))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def kept(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Parameters and the state of their optimizer."""
    found: dict[str, Any] = dict(model.state_dict())
    for name, row in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[row].items()}
    return found


def compared(device: str, make: Made, steps: Any) -> None:
    """Four steps beside those of eager mode."""
    (model, optimizer, ids), (eager, theirs, _) = small(device, make), small(device, make)
    with deterministic():
        program = whence.capture_step(steps(model, optimizer), (ids,), model=model, optimizer=optimizer)
        run, step = program.bind(model, optimizer), steps(eager, theirs)
        for _ in range(4):
            assert torch.equal(run(ids), step(ids))
            assert differing(kept(eager, theirs), kept(model, optimizer)) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("device", DEVICES)
def test_optimizers(device: str, name: str) -> None:
    """With the implementation that PyTorch takes there."""
    compared(device, OPTIMIZERS[name], plain)


@pytest.mark.parametrize("name", CAPTURABLE)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_optimizers_that_graphs_take(device: str, name: str) -> None:
    """Their counts lie on the device."""
    compared(device, CAPTURABLE[name], plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_are_scaled(device: str, dtype: torch.dtype) -> None:
    """A scaler that grows, and skips steps that are not finite."""
    scalers: list[torch.amp.GradScaler] = []

    def scaled(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
        scaler = torch.amp.GradScaler(device, init_scale=64.0, growth_interval=2)
        scalers.append(scaler)

        def step(ids: Tensor) -> Tensor:
            with torch.autocast(device, dtype):
                loss = next_token_loss(model(ids))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        return step

    (model, optimizer, ids), (eager, theirs, _) = (small(device, OPTIMIZERS["sgd"]) for _ in range(2))
    with deterministic():
        step = scaled(model, optimizer)
        program = whence.capture_step(step, (ids,), model=model, optimizer=optimizer, decide="example")
        run, reference = program.bind(model, optimizer), scaled(eager, theirs)
        for _ in range(4):
            assert torch.equal(run(ids), reference(ids))
            assert differing(kept(eager, theirs), kept(model, optimizer)) == []
    assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize("name", CAPTURABLE)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_bound_step_in_a_graph_of_the_device(device: str, name: str) -> None:
    """Recorded once by CUDA, and replayed."""
    (model, optimizer, ids), (eager, theirs, _) = (small(device, CAPTURABLE[name]) for _ in range(2))
    program = whence.capture_step(plain(model, optimizer), (ids,), model=model, optimizer=optimizer)
    run, step = program.bind(model, optimizer), plain(eager, theirs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(ids)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        step(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run(ids)
    for _ in range(3):
        graph.replay()
        assert torch.allclose(loss, step(ids))  # order of sums over blocks is free without determinism
    torch.cuda.synchronize()


@pytest.mark.parametrize("device", DEVICES[1:])
def test_memory_at_the_peak_is_that_of_eager(device: str) -> None:
    """Kept values go in the order in which eager mode lets go of them: at most five hundredths more."""
    peaks = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(512, 256, 256, 4, 6)).to(device)
        optimizer = AdamW(model.parameters(), lr=0.01)
        ids = torch.arange(256, device=device)[None].expand(8, -1).contiguous()
        step: Any = plain(model, optimizer)
        step(ids)
        if ours:
            program = whence.capture_step(step, (ids,), model=model, optimizer=optimizer)
            step = program.bind(model, optimizer)
        step(ids)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(ids)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, optimizer, step
        torch.cuda.empty_cache()
    assert peaks[1] <= 1.05 * peaks[0], peaks
