"""Measure two roads side by side."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Result:
    """One figure beside its yardstick; `limit` bounds the ratio, or the amount where nothing is compared."""

    name: str
    ours: float
    theirs: float | None
    limit: float
    unit: str

    @property
    def value(self) -> float:
        """The ratio, or the amount."""
        return self.ours if self.theirs is None else self.ours / self.theirs

    @property
    def ok(self) -> bool:
        """Whether the limit holds."""
        return self.value <= self.limit

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "MISS"
        if self.theirs is None:
            return f"{mark} {self.name}: {self.ours:.3g} {self.unit} (at most {self.limit:g})"
        figures = f"{self.ours:.4g} against {self.theirs:.4g} {self.unit}"
        return f"{mark} {self.name}: {self.value:.3f} (at most {self.limit:g}; {figures})"


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """The median time of `work`, with the garbage collected before each run."""
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def in_a_row(work: Callable[[], Any], repeats: int) -> float:
    """The median time of a short piece of work that is done again and again."""
    times = []
    for _ in range(repeats + 10):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times[10:])


def side_by_side(
    first: Callable[[], Any], second: Callable[[], Any], repeats: int = 200
) -> tuple[float, float]:
    """Median times of two short pieces of work, run in turns so that both meet the same machine."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 10):
        for work, noted in zip((first, second), times, strict=True):
            start = time.perf_counter()
            work()
            if repeat >= 10:
                noted.append(time.perf_counter() - start)
    return median(times[0]), median(times[1])


def llama(layers: int) -> LlamaForCausalLM:
    """The yardstick of the design: hidden size 256, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=256,
        intermediate_size=688,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
    )
    return LlamaForCausalLM(config)


def batch() -> dict[str, Any]:
    """Two sequences of 32 tokens."""
    return {
        "input_ids": torch.randint(0, 1000, (2, 32), generator=torch.Generator().manual_seed(0)),
        "use_cache": False,
    }
