"""Models of published size on the meta device, each in a process of its own: its memory is then known."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

import whence
from benchmarks.captures import joint_program
from benchmarks.models import batch, labelled, large_llama, llama, meta_batch
from benchmarks.results import Figures, Sample
from benchmarks.timing import alone

KIB_PER_GIB = 2**20
LENGTH = 128
REPEATS = 5


def joint_time(size: str) -> Figures:
    """Seconds of a joint capture."""
    found = _measured(size)
    return Figures(Sample(found["seconds"], REPEATS), None, "s", f"{found['nodes']:,} nodes")


def memory(size: str) -> Figures:
    """What a forward and a joint capture, both held, add to the process."""
    return Figures(Sample(_measured(size)["gibibytes"], 1), None, "GiB")


@cache
def _measured(size: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.meta", size, str(torch.get_num_threads())]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def _measure(size: str) -> dict[str, Any]:
    joint_program(llama(2), labelled(batch()))
    model, inputs = large_llama(size), labelled(meta_batch(1, LENGTH))
    before = _held()
    forward, joint = whence.capture(model, (), inputs), joint_program(model, inputs)
    added = (_peak() - before) / KIB_PER_GIB
    nodes = len(joint.graph.nodes)
    del forward, joint
    seconds = alone(lambda: joint_program(model, inputs), REPEATS).median
    return {"seconds": seconds, "gibibytes": added, "nodes": nodes}


def _held() -> int:
    """The memory this process holds, in KiB; the highest mark starts again from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """The most memory this process has held, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    sys.stdout.write(json.dumps(_measure(sys.argv[1])) + "\n")
