"""Models to interrupt, and ways to interrupt them at every moment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whence

SOURCE = Path(whence.__file__).parent
X = torch.ones(2, 4)


class Cell:
    """An object that a module holds and writes to."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[str] = []


class Guarded(nn.Linear):
    """A layer with a `__getattribute__` of its own."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Busy(nn.Module):
    """Changes itself in every way that a capture gives back."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Guarded(4, 4), nn.Dropout(0.5))
        self.named = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "last": nn.Linear(4, 4)})
        self.register_buffer("table", torch.zeros(4))
        self.cell = Cell()
        self.layers[0].register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        self.cell.calls += 1
        self.cell.seen.append("forward")
        self.table = self.table + 1
        hidden: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        hidden = self.named["norm"](hidden)
        self.extra = "set in forward"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.named["last"](hidden)
        return hidden.float() + self.table


class Lazy(nn.Module):
    """Has a layer without parameters before a busy part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyLinear(4)
        self.busy = Busy()

    def forward(self, x: Tensor) -> Tensor:
        return self.busy(self.first(x))


def loss(output: Tensor) -> Tensor:
    return output.sin().sum()


def _is_ours(frame: FrameType) -> bool:
    """Whether a step is one of whence, or of a context that whence enters or leaves, not torch."""
    caller = frame if frame.f_code.co_filename != contextlib.__file__ else frame.f_back
    is_ours = caller is not None and caller.f_code.co_filename.startswith(str(SOURCE))
    return is_ours and not ends_the_process(frame)


def ends_the_process(frame: FrameType | None) -> bool:
    """Whether C++ asks for a fake tensor's device: it may do so where it lets no exception out."""
    while frame is not None:
        if frame.f_code.co_name in ("inner", "__torch_dispatch__") and _asks_for_device(frame):
            return True
        frame = frame.f_back
    return False


def _asks_for_device(frame: FrameType) -> bool:
    named = frame.f_locals.get("func"), *frame.f_locals.get("args", ())
    return any(part is torch.ops.prim.device.default for part in named)


@dataclass
class Interruption:
    """Raises when a number of steps in some files have been taken on this thread; counts them otherwise.

    A step is a line, or one instruction. The tracing that Python offers to debuggers raises exactly where an
    asynchronous exception would come out, and at more places.
    """

    at: int | None
    files: tuple[str, ...]
    instructions: bool = False
    kind: type[BaseException] = KeyboardInterrupt
    steps: int = 0
    where: list[str] = field(default_factory=list)

    def _entered(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        frame.f_trace_opcodes = self.instructions
        frame.f_trace_lines = not self.instructions
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == ("opcode" if self.instructions else "line"):
            self.steps += 1
            if self.at is not None and self.steps >= self.at and _is_ours(frame):
                sys.settrace(None)
                self.where.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
                raise self.kind
        return self._stepped

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the steps of the block, and raise."""
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            yield
        finally:
            sys.settrace(before)


_PATCHING = (
    *("tracing/capture.py", "tracing/lazy_modules.py", "tracing/recording/run.py"),
    *(f"tracing/sandbox/{name}.py" for name in ("undo", "capture_lock", "side_effects", "module_snapshot")),
    *("tracing/reads/attribute_reads.py", "_torch/patching.py", "_torch/autograd/switches.py"),
    *("_torch/autograd/saved_tensors.py", "_torch/subclasses/lazy_modules.py"),
    *(f"_torch/observe/{name}.py" for name in ("compile_flags", "wrappers", "module_calls", "module_writes")),
    "_torch/observe/checkpoints.py",
)
CAREFUL = (*(str(SOURCE / file) for file in _PATCHING), contextlib.__file__)
"""Where patches are put on and taken off."""

EVERYWHERE = (str(SOURCE), contextlib.__file__)


def steps_of(work: Callable[[], object], files: tuple[str, ...], *, instructions: bool) -> int:
    """How many steps there are to interrupt."""
    counting = Interruption(None, files, instructions)
    with counting.running():
        work()
    return counting.steps
