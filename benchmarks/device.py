"""A GPT of twelve layers on a CUDA device: what was captured beside eager mode (`make bench-cuda`)."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import whence
from whence.demo import GPT, GPTConfig, next_token_loss

Call = Callable[[], Any]
_ROUNDS, _CALLS = 7, 10


@dataclass(frozen=True)
class Size:
    """A GPT and its batch."""

    name: str
    config: GPTConfig
    batch: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Row:
    """Milliseconds of one call and bytes at the peak, of eager mode and of ours."""

    name: str
    eager: float
    ours: float
    eager_peak: int
    peak: int

    def __str__(self) -> str:
        ratio, peaks = self.ours / self.eager, self.peak / max(self.eager_peak, 1)
        return f"{self.name:44} {self.eager:9.3f} ms {self.ours:9.3f} ms {ratio:7.3f}   peak {peaks:6.3f}"


SIZES = (
    Size("host-bound", GPTConfig(512, 64, 128, 4, 12), 2, torch.float32),
    Size("device-bound", GPTConfig(8192, 1024, 1024, 16, 12), 32, torch.bfloat16),
)


def made(size: Size) -> tuple[nn.Module, AdamW, Tensor]:
    """The same bits at every call."""
    torch.manual_seed(0)
    model = GPT(size.config).to("cuda", size.dtype)
    ids = torch.randint(0, size.config.vocabulary, (size.batch, size.config.context), device="cuda")
    return model, AdamW(model.parameters(), lr=1e-4, capturable=True), ids


def training(model: nn.Module, optimizer: AdamW) -> Callable[[Tensor], Tensor]:
    """A step as people write it."""

    def step(ids: Tensor) -> Tensor:
        loss = next_token_loss(model(ids))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def milliseconds(call: Call) -> float:
    """Of one call, on the clock of the device, several in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / _CALLS


def peak(call: Call) -> int:
    """Bytes above what lies there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def beside(name: str, eager: Call, ours: Call) -> Row:
    """Both in turns, the median of each."""
    for call in (eager, ours) * 3:
        call()
    peaks = peak(eager), peak(ours)
    times = [(milliseconds(eager), milliseconds(ours)) for _ in range(_ROUNDS)]
    eager_time, time = (statistics.median(column) for column in zip(*times, strict=True))
    return Row(name, eager_time, time, *peaks)


def recorded(call: Call) -> Call:
    """A graph of CUDA of it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def rows(size: Size) -> Iterator[Row]:
    """A forward, a forward and backward of a tree, a step, and a step in a graph."""
    (model, optimizer, ids), (twin, theirs, _) = made(size), made(size)
    forward = whence.capture(model, (ids,))
    with torch.no_grad():
        yield beside(f"{size.name}: forward, flat", lambda: model(ids), partial_call(forward.module(), ids))
        yield beside(
            f"{size.name}: forward, tree", lambda: model(ids), partial_call(forward.unflatten(), ids)
        )
    joint = whence.capture(model, (ids,), backward=next_token_loss)
    for way in ("module", "unflatten"):
        run = getattr(joint, way)()
        yield beside(
            f"{size.name}: joint, {way}", lambda: grown(twin, ids), partial(ours_grown, model, run, ids)
        )
    for row in (*model.parameters(), *twin.parameters()):
        row.grad = None
    step = training(model, optimizer)
    program = whence.capture_step(step, (ids,), model=model, optimizer=optimizer)
    bound, reference = program.bind(model, optimizer), training(twin, theirs)
    yield beside(f"{size.name}: step", lambda: reference(ids), lambda: bound(ids))
    graphs = recorded(lambda: reference(ids)), recorded(lambda: bound(ids))
    yield beside(f"{size.name}: step in a graph of CUDA", *graphs)


def partial_call(run: Any, ids: Tensor) -> Call:
    """A call on a batch."""
    return lambda: run(ids)


def grown(model: nn.Module, ids: Tensor) -> None:
    """Gradients of eager mode, from none."""
    model.zero_grad()
    next_token_loss(model(ids)).backward()


def ours_grown(model: nn.Module, run: Any, ids: Tensor) -> None:
    """Those of what was captured."""
    model.zero_grad()
    run(ids)[0].backward()


def main() -> None:
    """Print the rows."""
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: nothing is measured")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")  # noqa: T201
    print(f"{'':44} {'eager':>12} {'whence':>12} {'ratio':>7}")  # noqa: T201
    for size in SIZES:
        for row in rows(size):
            print(row, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
