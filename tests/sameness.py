"""Everything about a program in terms of positions in its graph: equal ones are one program."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from whence import Program, tracing
from whence.guards import guards_of
from whence.program.calls import Absent, Constant, Named, Structure
from whence.program.node_records import origin_of
from whence.tracing.sandbox.capture_lock import without_collection


def description(program: Program) -> dict[str, Any]:
    """All that a program says, but for the names of its nodes."""
    return {
        "operations": _operations(program),
        "calls": _calls(program),
        "adjoints": _adjoints(program),
        "inputs": [_row(row, program) for row in program.signature.inputs],
        "outputs": [_row(row, program) for row in program.signature.outputs],
        "guards": [
            (guard.to_dict(), guard.kind, guard.name, guard.holder, guard.positions)
            for guard in program.guards
        ],
        "unguarded": [str(row) for row in program.guards.unguarded],
        "holders": [str(holder) for holder in program.guards.holders],
        "layers": _layers(program),
        "rest": _rest(program),
    }


def differences(left: Program, right: Program) -> dict[str, list[tuple[Any, Any]]]:
    """Where two programs differ: pairs of what each says, some of each part."""
    first, second = description(left), description(right)
    found: dict[str, list[tuple[Any, Any]]] = {}
    for part, said in first.items():
        other = second[part]
        if said != other:
            pairs = [pair for pair in zip(_items(said), _items(other), strict=False) if pair[0] != pair[1]]
            found[part] = pairs[:3] or [(len(said), len(other))]
    return found


def _items(said: Any) -> list[Any]:
    return list(said.items()) if isinstance(said, dict) else list(said)


def _positions(program: Program) -> dict[str, int]:
    return {node.name: position for position, node in enumerate(program.graph.nodes)}


def _operations(program: Program) -> list[tuple[Any, ...]]:
    position = _positions(program)
    rows = []
    for node in program.graph.nodes:
        origin = origin_of(node)
        given: Any = (node.args, node.kwargs)
        arguments = fx.map_arg(given, partial(_spelled, position=position))
        rows.append(
            (
                node.op,
                node.name if node.op == "placeholder" else str(node.target),
                str(arguments),
                _value(node.meta.get("val")),
                node.meta.get("torch_fn"),
                (origin.phase, origin.calls, origin.quality, origin.source, origin.place),
                (origin.recomputed, origin.hook, _at(origin.forward, position)),
            )
        )
    return rows


def _spelled(node: fx.Node, position: dict[str, int]) -> Any:
    return f"%{position[node.name]}"


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return tuple(value.shape), value.dtype, strides, str(value.device), value.requires_grad
    return tuple(map(_value, value)) if isinstance(value, tuple | list) else repr(value)


def _at(name: str | None, position: dict[str, int]) -> int | None:
    return None if name is None else position[name]


def _structure(structure: Structure | None, position: dict[str, int]) -> Any:
    if structure is None:
        return None
    leaves: list[Any] = []
    for leaf in structure.leaves:
        match leaf:
            case Named(name):
                leaves.append(position[name])
            case Constant(value):
                leaves.append(repr(value))
            case Absent(reason):
                leaves.append(reason)
    return str(structure.spec), leaves


def _calls(program: Program) -> list[tuple[Any, ...]]:
    position = _positions(program)
    return [
        (
            call.number,
            call.site,
            call.parent,
            _structure(call.inputs, position),
            _structure(call.outputs, position),
            str(call.parameters),
        )
        for call in program.calls.rows
    ]


def _adjoints(program: Program) -> dict[int, list[tuple[int | None, int, int | None]]]:
    position = _positions(program)
    return {
        position[value]: [
            (_at(part.node, position), part.scope, _at(part.sum, position)) for part in adjoint.contributions
        ]
        for value, adjoint in program.facts.adjoints.items()
    }


def _row(row: Any, program: Program) -> tuple[Any, ...]:
    held = getattr(row, "node", None)
    return (
        *(row.name, row.kind, row.path, row.of, _value(row.value)),
        *(getattr(row, "aliases", ()), getattr(row, "module", None), getattr(row, "module_type", None)),
        _at(held, _positions(program)),
    )


def _layers(program: Program) -> list[tuple[Any, ...]]:
    position = _positions(program)
    return [
        (
            group.type,
            group.calls,
            *([[position[x] for x in names] for names in group.forward + group.backward]),
        )
        for group in program.layers()
    ]


def _rest(program: Program) -> dict[str, Any]:
    position, facts = _positions(program), program.facts
    return {
        "result": _structure(program.result, position),
        "opaque": program.circumstances.opaque,
        "histories": {name: [position[x] for x in made] for name, made in facts.histories.items()},
        "written": {position.get(name): [position.get(x) for x in m] for name, m in facts.written.items()},
        "differentiable": {position.get(name) for name in facts.differentiable},
        "straight through": {position[name] for name in facts.straight_through},
        "turned on": {position[name] for name in facts.turned_on},
        "asked": program.asked,
        "layouts": {row.name for row in program.signature.inputs if row.layout_read},
        "seed": _at(facts.seed, position),
        "state": list(program.state),
        "modules": program.modules,
        "changes": program.guards.changes,
        "reads memory": program.convention.reads_memory,
    }


def first_run(
    model: Any, args: Any, *, backward: Any = False, reuse: bool = True, shapes: Any = None
) -> Program:
    """The program of one run, also of a model whose next run computes something else, which is refused."""
    given = tracing.Given(args, None, shapes)
    program, observed = without_collection(lambda: tracing.capture(model, given, backward, reuse=reuse))
    held = {field.name: getattr(program, field.name) for field in fields(program)}
    return Program(**{**held, "guards": guards_of(program, observed)})
