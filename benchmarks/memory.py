"""What capturing a large model adds to the process."""

import resource
import subprocess
import sys
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import whence
from benchmarks.measuring import Result, llama

GIB = 2**20  # of the kibibytes that getrusage counts in


def meta_capture() -> Result:
    """Forward and joint capture of a model of eight billion parameters on the meta device, in a fresh process."""
    command = [sys.executable, "-c", "from benchmarks.memory import measure; measure()"]
    added = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return Result("memory added by capturing 8 B parameters on meta", added, None, 1.0, "GiB")


def measure() -> None:
    """Write the growth of this process in GiB."""
    small = llama(1)
    ids = torch.zeros(1, 16, dtype=torch.int64)
    whence.capture(small, (), {"input_ids": ids, "labels": ids, "use_cache": False}, backward=lambda o: o.loss)
    with torch.device("meta"):
        model = LlamaForCausalLM(_eight_billion())
        ids = torch.zeros(1, 128, dtype=torch.int64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    forward = whence.capture(model, (), inputs)
    joint = whence.capture(model, (), inputs, backward=lambda outputs: outputs.loss)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(f"{len(forward.graph.nodes)} {len(joint.graph.nodes)} {(after - before) / GIB}\n")


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
