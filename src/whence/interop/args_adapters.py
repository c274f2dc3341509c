"""Arguments of another structure than the captured one, made to fit by torch.export's `FlatArgsAdapter`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.export import FlatArgsAdapter

from whence._torch.pytrees import TreeSpec
from whence.program import Program


def adapted(program: Program, adapter: FlatArgsAdapter | None) -> Program:
    """The program with an adapter for its own arguments; itself where there is none."""
    if adapter is None:
        return program

    def adapt(target: TreeSpec, given: TreeSpec, leaves: list[Any]) -> Sequence[Any]:
        return adapter.adapt(target, given, leaves)

    return program.with_changes(convention=replace(program.convention, adapter=adapt))
