"""Arguments that share memory where those of the capture did not."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from whence._torch.tensors import share_memory
from whence.errors import CallError, Fault
from whence.program.arguments.convention import Convention


def refuse_overlap(convention: Convention, written: Sequence[int], flat: Sequence[Any]) -> None:
    """An input that is written must not share its memory with another: the capture saw two."""
    if not written:
        return
    paths, same = convention.paths, {frozenset(pair) for pair in convention.same}
    faults = [
        Fault(
            f"{paths[at]} and {paths[other]} share memory, and did not at capture",
            why=f"the program writes {paths[at]}, and {paths[other]} would not see it",
            remedy="pass a clone of one of them, or capture with the same sharing",
        )
        for at in written
        for other, leaf in enumerate(flat)
        if other != at and frozenset((at, other)) not in same and isinstance(leaf, Tensor)
        if not (other in written and other < at)
        if share_memory(leaf, flat[at])
    ]
    if faults:
        raise CallError.of(faults)
