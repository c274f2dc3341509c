"""Does memory that nobody has written reach a result?

`torch.empty` gives what lay there: a run that reads it is like no other, of eager's or of the program's.
Whether all of it is written first, piece by piece, no graph says. So the program is run with one number in
that memory, and with another.
"""

from collections.abc import Callable, Sequence

import torch

from whence._torch.graphs import own_copy
from whence._torch.operators.table import said_of
from whence.execution.compare import compare
from whence.execution.running import Run
from whence.program import Program
from whence.program.node_records import place_of

aten = torch.ops.aten


def uninitialised_reads(program: Program, run: Callable[[Program], Run]) -> tuple[str, ...]:
    """Where a program takes memory that is read before it is written, and what that reaches."""
    names = [node.name for node in program.graph.nodes if said_of(node.target).gives_memory and node.users]
    if not names or not _reached(program, names, run):
        return ()
    reached = {name: _reached(program, [name], run) for name in names}
    return tuple(_told(program, name, found) for name, found in reached.items() if found)


def _reached(program: Program, names: Sequence[str], run: Callable[[Program], Run]) -> list[str]:
    """What differs when other numbers lie in the memory that these nodes give."""
    rows = compare(run(_filled(program, names, 1)), run(_filled(program, names, torch.nan)))
    return [f"{row.kind} {row.name}" for row in rows if not row.equal]


def _filled(program: Program, names: Sequence[str], number: float) -> Program:
    """The program with a number in that memory; where NaN is none, with 0."""
    module = own_copy(program.graph_module)
    for node in [node for node in module.graph.nodes if node.name in names]:
        dtype = node.meta["val"].dtype
        held = number if dtype.is_floating_point or dtype.is_complex else int(number == 1)
        with module.graph.inserting_before(node):
            given = module.graph.node_copy(node, lambda source: source)
        node.target, node.args, node.kwargs = aten.fill.Scalar, (given, held), {}
    return program.with_changes(graph_module=module)


def _told(program: Program, name: str, reached: Sequence[str]) -> str:
    return f"{name} ({place_of(program.node(name))}) reaches {', '.join(reached)}"
