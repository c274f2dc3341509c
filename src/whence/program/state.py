"""Two views of a program's state: inputs of the graph, or attributes of its module; one set of origins."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from whence._torch.graphs import graph_module, nested_graph, placeholder
from whence._torch.record.recorder import FakeTensor
from whence.errors import Fault, UsageError
from whence.program.arguments.open_sizes import with_variants
from whence.program.program import Program
from whence.program.signature import Input
from whence.schema import STATE_KINDS

P = TypeVar("P", bound=Program)


def with_state(program: P, view: str) -> P:
    """The program with its state as `"inputs"` or `"attributes"`; a new graph, the same names and origins."""
    if program.variants:
        return with_variants(program, lambda each: with_state(each, view))
    match view:
        case "inputs":
            return _rebuilt(program, held=()) if program.signature.attributes else program
        case "attributes":
            rows = tuple(row for row in program.signature.inputs if row.kind in STATE_KINDS)
            return _rebuilt(program, held=(*program.signature.attributes, *rows)) if rows else program
        case _:
            raise UsageError.of(view_faults(view))


def view_faults(view: object) -> list[Fault]:
    """What is wrong with the name of a view."""
    if view in ("inputs", "attributes"):
        return []
    return [Fault(f"state cannot be {view!r}", remedy='use "inputs" or "attributes"')]


def refuse_elsewhere(program: Program) -> None:
    """Raise `UsageError` for a program that was captured for a device on which its state is not."""
    wanted = program.circumstances.device
    if wanted is None:
        return
    kind = wanted.partition(":")[0]
    held = [program.state[row.name] for row in program.signature.inputs if row.name in program.state]
    is_there = all(not isinstance(tensor, FakeTensor) for tensor in held)
    if is_there and torch.get_device_module(kind).is_available():
        return
    raise UsageError(
        f"the program of {program.name} was captured for {wanted} and cannot run here",
        why="it was recorded from fake tensors alone, and its operators are those of that device",
        remedy=f"where that device is, run it on the model there: program.bind(model.to({kind!r})); to run "
        "here, capture without device",
    )


def _rebuilt(program: P, held: tuple[Input, ...]) -> P:
    """The program with exactly the rows `held` as attributes."""
    every = (
        *program.signature.state,
        *(row for row in program.signature.inputs if row.kind not in STATE_KINDS),
    )
    names = {row.name for row in held}
    inputs = tuple(row for row in every if row.name not in names)
    graph = _graph_over(program.graph, held, inputs)
    root: dict[str, Any] = {row.path: program.state[row.name] for row in held}
    root |= {
        str(node.target): inner for node in program.graph.nodes if (inner := nested_graph(node)) is not None
    }
    return program.with_changes(
        graph_module=graph_module(root, graph, program.name),
        signature=replace(program.signature, inputs=inputs, attributes=held),
    )


def _graph_over(old: fx.Graph, held: tuple[Input, ...], inputs: tuple[Input, ...]) -> fx.Graph:
    before = {node.name: node for node in old.nodes if node.op in ("placeholder", "get_attr")}
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for row in inputs:
        made[before[row.name]] = placeholder(graph, row.name, before[row.name].meta)
    for row in held:
        node = made[before[row.name]] = graph.create_node("get_attr", row.path, name=row.name)
        node.meta = dict(before[row.name].meta)
    for node in old.nodes:
        if node not in made:
            made[node] = graph.node_copy(node, lambda source: made[source])
    return graph


def state_of_loss(program: Program) -> tuple[Input, ...]:
    """The state that no module of the model holds, and the loss function does."""
    known = {record.path for record in program.modules}
    rows = program.signature.state if program.loss_function is not None else ()
    return tuple(row for row in rows if row.module is not None and row.module not in known)


def bound_state(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The program's state with tensors of another model in place of the captured ones, by qualified name."""
    rows = [(row.name, (row.path, *row.aliases)) for row in program.signature.state]
    rows += [
        (row.name, (row.path, *row.aliases)) for row in program.signature.wholes if row.tensor is not None
    ]
    found = {name: next((path for path in paths if path in tensors), None) for name, paths in rows}
    return {name: program.state[name] if path is None else tensors[path] for name, path in found.items()}
