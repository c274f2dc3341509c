"""Take composite operations apart where it matters what they are made of.

Under autocast an operation casts its arguments, and the casts must be in the graph. Where memory is written,
a composite such as `reshape` must say whether it looks into that memory or copies it, and `batch_norm` that
it writes its statistics.
"""

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.export.programs import looks_into
from whence._torch.graphs import fake_result
from whence._torch.operators.decompositions import Operation, decomposition_of
from whence._torch.operators.schemas import OpOverload, is_composite, op_name, written_nodes
from whence.errors import Fault
from whence.interop.graphs.aliases import aliases_in
from whence.interop.graphs.faults import place_of
from whence.interop.graphs.frames import STACK
from whence.interop.graphs.inline import Flat, Region
from whence.rewriting.splice import Splice, UnknownValueError, called_again, replace_by

aten = torch.ops.aten
_KEPT = ("stack_trace", "torch_fn", STACK)


def with_casts(flat: Flat) -> None:
    """Write the casts of autocast regions into the graph.

    The strict front end notes values inside such a region as if there were none, and asserts that they are
    so: what follows from a cast is noted anew, and assertions about it go.
    """
    if not any(region.autocast for region in flat.regions.values()):
        return
    changed: set[fx.Node] = set()
    for node in flat.operations:
        stale = not changed.isdisjoint(node.all_input_nodes)
        if stale and node.target is aten._assert_tensor_metadata.default:
            flat.graph.erase_node(node)
            continue
        region, before = flat.regions.get(node, Region()), _dtypes(node.meta.get("val"))
        found = _decompose(flat, node, region) if region.autocast else node
        if found is node and stale and isinstance(node.target, OpOverload):
            node.meta["val"] = fake_result(node.target, node.args, node.kwargs)
        made = found if isinstance(found, (tuple, list)) else [found]
        if _dtypes([each.meta.get("val") for each in made]) != _dtypes([before]):
            changed.update(made)


def _dtypes(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [dtype for item in value for dtype in _dtypes(item)]
    return [value] if isinstance(value, torch.dtype) else [value.dtype] if isinstance(value, Tensor) else []


def without_hidden_writes(flat: Flat) -> None:
    """Take apart composite operations that may look into memory that is written, or write themselves."""
    aliases = aliases_in(flat.graph)
    if not aliases.written:
        return
    groups = {aliases.group(node) for node in aliases.written}
    for node in list(flat.graph.nodes):
        if node.op != "call_function" or not is_composite(node.target):
            continue
        if written_nodes(node) or (looks_into(node.target) and aliases.group(node) in groups):
            _decompose(flat, node, flat.regions.get(node, Region()))


def _decompose(flat: Flat, node: fx.Node, region: Region) -> Any:
    """Replace a node by what it does; the node or the nodes that hold its value now."""
    if node.target is operator.getitem:
        return node
    if not isinstance(node.target, OpOverload):
        _note_fault(flat, node, "it is no operator, and what it does under autocast cannot be written down")
        return node
    values = {source: source.meta.get("val") for source in node.all_input_nodes}
    fakes, call = list(values.values()), partial(called_again, node, node.target, values)
    with torch.no_grad() if region.without_grad else nullcontext():
        operations, result = decomposition_of(call, fakes, region.autocast)
        plain = decomposition_of(call, fakes)[0] if region.autocast else operations
    if region.autocast and _operators_of(plain) == _operators_of(operations):
        return node
    splice = Splice(node, values, partial(_inherit, flat, node))
    try:
        for operation in operations:
            splice.add(operation)
        replacement = splice.known(result)
    except UnknownValueError as unknown:
        _note_fault(flat, node, str(unknown))
        return node
    for gone, now in replace_by(node, replacement):
        _forget(flat, gone, now)
    return replacement


def _inherit(flat: Flat, node: fx.Node, made: fx.Node) -> None:
    made.meta |= {key: node.meta[key] for key in _KEPT if key in node.meta}
    if node in flat.regions:
        flat.regions[made] = flat.regions[node]


def _operators_of(operations: Sequence[Operation]) -> list[Any]:
    return [operation.target for operation in operations]


def _note_fault(flat: Flat, node: fx.Node, why: str) -> None:
    flat.faults.append(
        Fault(
            f"{op_name(node.target)} cannot be taken apart",
            where=place_of(node),
            why=why,
            remedy="call run_decompositions({}) on the exported program first",
        )
    )


def _forget(flat: Flat, node: fx.Node, replacement: Any) -> None:
    for name, value in flat.made.items():
        if value is node:
            flat.made[name] = replacement
    flat.returned = tuple(replacement if value is node else value for value in flat.returned)
