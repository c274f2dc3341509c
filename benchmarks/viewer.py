"""The page of a deep model: how large it is, and how fast in Chromium.

Without Node, the packages of `viewer/` and Chromium no time is measured, and the row says so.
"""

import json
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.captures import joint_program
from benchmarks.models import labelled, llama_on_meta, meta_batch
from benchmarks.results import Figures, Sample

LAYERS = 126
VIEWER = Path(__file__).parents[1] / "viewer"
MISSING = "not measured: needs Node, Chromium, and npm ci in viewer/"


def size() -> Figures:
    """Megabytes of the file."""
    page, nodes = _page()
    return Figures(Sample(page.stat().st_size / 1e6, 1), None, "MB", f"{nodes:,} nodes")


def paint() -> Figures:
    """Seconds until the tree can be seen, in a browser that has just been started."""
    times = _measured().get("paint")
    if times is None:
        return Figures(None, None, "s", MISSING)
    return Figures(Sample(median(times) / 1000, len(times)), None, "s", "Chromium, started afresh")


def opening() -> Figures:
    """Milliseconds until the graph of a call can be seen: the slowest of all different calls."""
    opened = _measured().get("open")
    if opened is None:
        return Figures(None, None, "ms", MISSING)
    name, slowest = max(opened, key=lambda each: float(each[1]))
    return Figures(Sample(slowest, len(opened)), None, "ms", f"{len(opened)} calls; {name or '(root)'}")


@cache
def _page() -> tuple[Path, int]:
    program = joint_program(llama_on_meta(LAYERS), labelled(meta_batch(2, 32)))
    path = program.view(Path(tempfile.mkdtemp(prefix="whence-bench-")) / "page.html")
    return path, len(program.graph.nodes)


@cache
def _measured() -> dict[str, Any]:
    node = shutil.which("node")
    if node is None or not (VIEWER / "node_modules" / "playwright-core").exists():
        return {}
    command = [node, "tests/measure.mjs", str(_page()[0])]
    answer = subprocess.run(command, cwd=VIEWER, capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(answer)
    return found
