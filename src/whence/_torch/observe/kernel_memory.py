"""How much memory a kernel takes for itself: it runs once, and PyTorch's profiler watches."""

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from whence._torch.pytrees import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class KernelMemory:
    """The bytes of each result, and the most that is there beside them while the kernel runs."""

    results: tuple[int, ...]
    beside: int


@dataclass(frozen=True)
class Layout:
    """A tensor as a kernel sees it, without what is in it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def is_empty_workspace(self) -> bool:
        """Whether there is nothing in the bytes that a kernel left for its backward."""
        return self.dtype is torch.uint8 and 0 in self.shape

    def zeros(self) -> Tensor:
        """One of zeros; of those that share memory in it as in the original."""
        reach = (stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True))
        size = 0 if 0 in self.shape else 1 + sum(reach)
        return torch.zeros(size, dtype=self.dtype).as_strided(self.shape, self.strides)


def is_profiling() -> bool:
    """Whether a profiler of somebody else is running, which another one would end."""
    return torch.autograd._profiler_enabled()


def run_on_zeros(kernel: Any, args: Any, kwargs: Any) -> KernelMemory | None:
    """What a kernel takes with arguments of these layouts; whatever it raises is raised.

    None where that is no kernel of this CPU, or an argument is an empty workspace: a fake kernel made it, and
    the real one would read past its end.
    """
    leaves, spec = tree_flatten((args, kwargs))
    layouts = [leaf for leaf in leaves if isinstance(leaf, Layout)]
    if any(each.device.type != "cpu" or each.is_empty_workspace for each in layouts):
        return None
    args, kwargs = tree_unflatten(
        [leaf.zeros() if isinstance(leaf, Layout) else leaf for leaf in leaves], spec
    )
    with torch.enable_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        results = kernel(*args, **kwargs)
    sizes = tuple(
        leaf.untyped_storage().nbytes() if isinstance(leaf, Tensor) else 0
        for leaf in tree_flatten(results)[0]
    )
    return KernelMemory(sizes, max(accumulate(_bytes_taken(watched)), default=0) - sum(sizes))


def _bytes_taken(watched: profile) -> list[int]:
    """The bytes that were taken, or given back below zero, in order."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    rows = sorted((row for row in events if row.get("name") == "[memory]"), key=lambda row: row["ts"])
    return [int(row["args"]["Bytes"]) for row in rows]
