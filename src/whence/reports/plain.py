"""A program as plain data: signature, calls, nodes and origins, for other tools.

The keys are listed in `docs/schema.md`. Numbers, texts, truths and None are themselves; everything else is an
object with one key that says what it is: `{"node": "relu"}`, `{"dtype": "float32"}`, `{"size": "2*batch"}`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import op_name
from whence._torch.record.annotations import said_of
from whence._torch.sizes.symbols import SYMBOLIC, is_symbolic, number_of, spelled
from whence._torch.versions.release import release
from whence.program import (
    Absent,
    Call,
    Constant,
    DecisionByValue,
    Draw,
    FlatProgram,
    Input,
    Named,
    Output,
    Structure,
)
from whence.program.node_records import record_of
from whence.program.plain import SCHEMA, plain_fields
from whence.provenance import Origin

_NAMED = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "format"}


def plain(program: FlatProgram) -> dict[str, Any]:
    """Everything that a program says about its graph; tensors themselves are not in it."""
    return {
        "schema": SCHEMA,
        "name": program.name,
        "torch": release(),
        "inputs": [_input_as_data(row) for row in program.signature.inputs],
        "attributes": [_input_as_data(row) for row in program.signature.attributes],
        "outputs": [_output(row) for row in program.signature.outputs],
        "calls": [_call(call) for call in program.calls.rows],
        "nodes": [_node(node, program) for node in program.graph.nodes],
        "draws": [_draw_as_data(row) for row in program.signature.draws],
        "history": program.history.to_dict(),
        "decisions": [_decision(row) for row in program.decisions],
        "guards": program.guards.to_dict(),
    }


def _decision(row: DecisionByValue) -> dict[str, Any]:
    told = plain_fields(row, "node", "call", "source", "asked")
    return {**told, "answer": value_of(row.answer), "drawn": row.drawn}


def _draw_as_data(row: Draw) -> dict[str, Any]:
    return plain_fields(row, "node", "operation", "value", "phase", "call", "source", "generator", "library")


def _input_as_data(row: Input) -> dict[str, Any]:
    told = plain_fields(row, "name", "kind", "path", "aliases", "of")
    return {**told, "value": value_of(row.value), **plain_fields(row, "part")}


def _output(row: Output) -> dict[str, Any]:
    held = {"node": row.node} if row.node is not None else {"value": value_of(row.value)}
    return {**plain_fields(row, "name", "kind", "path", "of", "part"), **held}


def _call(call: Call) -> dict[str, Any]:
    return {
        "number": call.number,
        **plain_fields(call.site, "path", "index", "type"),
        "parent": None if call.number == 0 else call.parent,
        "inputs": _plain_leaves(call.inputs),
        "outputs": _plain_leaves(call.outputs),
    }


def _plain_leaves(structure: Structure | None) -> list[Any] | None:
    return None if structure is None else [_leaf_as_data(leaf) for leaf in structure.leaves]


def _leaf_as_data(leaf: Named | Constant | Absent) -> Any:
    match leaf:
        case Named(name):
            return {"node": name}
        case Constant(value):
            return value_of(value)
        case Absent(reason):
            return {"absent": reason}


def _node(node: fx.Node, program: FlatProgram) -> dict[str, Any]:
    inner, said = nested_graph(node), said_of(node)
    return {
        "name": node.name,
        "op": node.op,
        "target": op_name(node.target) if node.op == "call_function" else str(node.target),
        "args": value_of(node.args),
        "kwargs": value_of(node.kwargs),
        "value": value_of(node.meta.get("val")),
        "origin": _origin(node, program.where(node)),
        **({} if inner is None else {"graph": [_node(each, program) for each in inner.graph.nodes]}),
        **({"annotations": {str(key): value_of(each) for key, each in said.items()}} if said else {}),
    }


def _origin(node: fx.Node, origin: Origin) -> dict[str, Any]:
    adjoint = record_of(node).adjoint
    told = plain_fields(
        origin, "phase", "quality", "calls", "place", "source", "forward", "recomputed", "passes"
    )
    return {**told, "gradient": None if adjoint is None else adjoint.total}


def value_of(value: Any) -> Any:
    """An argument, or what a value is, as plain data."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}  # which JSON has no word for
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, Tensor):
        return {"tensor": _tensor_as_data(value)}
    if isinstance(value, SYMBOLIC):
        return {"size": spelled(value)} if is_symbolic(value) else number_of(value)
    if isinstance(value, Mapping):
        return {"mapping": {str(key): value_of(held) for key, held in value.items()}}
    if isinstance(value, slice):
        return {"slice": [value_of(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, Sequence):
        return [value_of(item) for item in value]
    kind = next((name for kind, name in _NAMED.items() if isinstance(value, kind)), "text")
    return {kind: str(value).removeprefix("torch.")}


def _tensor_as_data(tensor: Tensor) -> dict[str, Any]:
    strided = tensor.layout is torch.strided
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": [value_of(size) for size in tensor.shape],
        "strides": [value_of(size) for size in tensor.stride()] if strided else None,
        "device": str(tensor.device),
    }
