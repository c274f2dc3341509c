"""Arguments of another structure than the captured one, made to fit by torch.export's `FlatArgsAdapter`."""

from dataclasses import replace

from torch.export import FlatArgsAdapter

from whence.program import Program


def adapted(program: Program, adapter: FlatArgsAdapter | None) -> Program:
    """The program with an adapter for its own arguments; itself where there is none."""
    if adapter is None:
        return program
    return program.with_changes(convention=replace(program.convention, adapter=adapter.adapt))
