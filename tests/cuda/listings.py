"""What a program does, node for node, as text; run as a module it writes those of a device into a folder.

python -m tests.cuda.listings tests/golden/cuda
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

import whence
from tests.cuda.architectures import ARCHITECTURES
from tests.cuda.devices import made_on

FOLDER = Path(__file__).parents[1] / "golden" / "cuda"


def listing(program: whence.Program) -> str:
    """Operator, inputs and what it gives: dtype, shape, strides where they are unusual, device."""
    return "\n".join(_line(node) for node in program.graph.nodes if node.op == "call_function") + "\n"


def _line(node: fx.Node) -> str:
    target = str(node.target).replace("_unsafe_view", "view")  # releases differ in that
    inputs = ", ".join(_input(each) for each in (*node.args, *node.kwargs.values()))
    return f"{target}({inputs}) -> {', '.join(_given(node.meta.get('val')))}"


def _input(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}" if value.op == "placeholder" else "%"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_input, value)) + "]"
    return str(value)


def _given(value: Any) -> Iterator[str]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _given(each)
    if isinstance(value, Tensor):
        sizes = "x".join(map(str, value.shape))
        usual = torch.empty(value.shape, device="meta").stride()
        strides = "" if value.stride() == usual else f"/{'x'.join(map(str, value.stride()))}"
        kind = str(value.dtype).removeprefix("torch.")
        yield f"{kind}[{sizes}{strides}]@{value.device.type}"


def listed(name: str, backward: bool, *, device: str = "cpu", capability: str | None = None) -> str:
    """The listing of an architecture that lies on a device, or is captured for one."""
    model, args, kwargs = made_on(device, name)
    return listing(whence.capture(model, args, kwargs, backward=backward, device=capability))


def golden(name: str, *, backward: bool, folder: Path = FOLDER) -> Path:
    """Where the listing of an architecture is kept."""
    return folder / f"{name.replace(' ', '_')}_{'joint' if backward else 'forward'}.txt"


def main(folder: Path) -> None:
    """Write them all, the name of the device first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ARCHITECTURES:
        for backward in (False, True):
            text = listed(name, backward, device="cuda")
            head = f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n"
            golden(name, backward=backward, folder=folder).write_text(head + text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
