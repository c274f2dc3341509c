"""State that was converted or moved since the capture, whose casts and constants are in the graph."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from whence.errors import CallError
from whence.hierarchy.run.captured import captured_of
from whence.provenance import ModulePath


def refuse_moved(
    module: nn.Module, path: Iterable[str], held: object, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `CallError` where what `module` holds at `path` has another dtype, or is on another
    kind of device.

    What `torch.fx` puts in the place of a tensor has neither.
    """
    if not isinstance(held, Tensor) or (held.dtype is dtype and held.device.type == device.type):
        return
    now, then = f"{held.dtype} on {held.device}", f"{dtype} on {device}"
    raise CallError(
        f"{_path_of(module, path)} is {now} now, and was {then} at capture",
        why="the casts, constants and kernels in the graph are those of the capture",
        remedy="convert the model and capture again, or convert this module back",
    )


def _path_of(module: nn.Module, path: Iterable[str]) -> str:
    """The path from the root, which every module of a tree knows by the calls that it holds."""
    holder = captured_of(module)
    call = None if holder is None else next(iter(holder.bodies.values()), None)
    around = () if call is None else call.plan.site(call.number).path
    return str(ModulePath((*around, *path)))
