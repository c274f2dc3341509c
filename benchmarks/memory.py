"""What capturing a large model adds to the process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import whence
from benchmarks.measuring import Result, llama

KIB_PER_GIB = 2**20


def meta_capture() -> Result:
    """Forward and joint capture of eight billion parameters on the meta device, in a fresh process."""
    command = [sys.executable, "-c", "from benchmarks.memory import measure; measure()"]
    added = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return Result("memory added by capturing 8 B parameters on meta", added, None, 1.0, "GiB")


def measure() -> None:
    """Write the growth of this process in GiB."""
    small = llama(1)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    whence.capture(
        small, (), {"input_ids": ids, "labels": ids, "use_cache": False}, backward=lambda o: o.loss
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(_eight_billion())
        ids = torch.zeros(1, 128, dtype=torch.int64)
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts again from what is held now
    before = _peak()
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    forward = whence.capture(model, (), inputs)
    joint = whence.capture(model, (), inputs, backward=lambda outputs: outputs.loss)
    added = (_peak() - before) / KIB_PER_GIB
    sys.stdout.write(f"{len(forward.graph.nodes)} {len(joint.graph.nodes)} {added}\n")


def _peak() -> int:
    """The most memory this process has held, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def _eight_billion() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )


BENCHMARKS: dict[str, Callable[[], Result]] = {"meta-memory": meta_capture}
