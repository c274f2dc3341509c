"""Tensors of the state that look into one memory: where one of them is written, the others are read through
it.

In a functional graph two inputs are two values, and neither would see the other change.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from whence.errors import Fault, Place
from whence.interop.exported.state import State, in_one_memory, whole_of
from whence.interop.graphs.aliases import written_by
from whence.interop.graphs.inline import Flat

aten = torch.ops.aten


def read_through_one(flat: Flat, rows: Sequence[State], placeholders: Mapping[str, fx.Node]) -> None:
    """Read every tensor that shares its memory with a written one as a view of the one that covers both."""
    groups = in_one_memory(rows)
    if not groups or not _writes(flat.graph):
        return
    for group in groups:
        whole = whole_of(group)
        if whole is None:
            flat.faults.append(_no_whole(group))
            continue
        for row in group:
            if row is not whole and placeholders[row.name].users:
                _look_through(flat.graph, placeholders[row.name], placeholders[whole.name], row)


def _writes(graph: fx.Graph) -> bool:
    return any(written_by(node) for node in graph.nodes if node.op == "call_function")


def _look_through(graph: fx.Graph, placeholder: fx.Node, whole: fx.Node, row: State) -> None:
    tensor = row.tensor
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        arguments = (whole, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        view = graph.call_function(aten.as_strided.default, arguments)
    view.meta["val"] = aten.as_strided.default(whole.meta["val"], *arguments[1:])
    placeholder.replace_all_uses_with(view)


def _no_whole(group: Sequence[State]) -> Fault:
    names = ", ".join(row.first.target for row in group)
    return Fault(
        f"{names} look into one memory, and the graph writes to state",
        where=Place(str(group[0].first.path.parent)),
        why="none of them covers the others, and in a functional graph they are separate values",
        remedy="register the tensor that they are views of as a buffer, and take the views in forward",
    )
