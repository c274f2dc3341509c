"""Two views of a program's state, inputs of the graph or attributes of its module; and copies of it."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, fx

from whence._torch.fakes import FakeTensor
from whence._torch.graphs import graph_module, nested_graph, own_copy, placeholder
from whence._torch.subclasses.spread import out_of_reach
from whence._torch.subclasses.wrapper_subclasses import plain_parts
from whence.errors import CallError, Fault, UsageError
from whence.program.arguments.variants import with_variants
from whence.program.program import FlatProgram
from whence.program.signature import Input, Whole
from whence.schema import STATE_KINDS

P = TypeVar("P", bound=FlatProgram)


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


def refuse_elsewhere(program: FlatProgram) -> None:
    """Raise `UsageError` for a program captured for a device on which its state is not, or for processes that
    are not here."""
    _refuse_without_processes(program)
    wanted = program.circumstances.device
    if wanted is None:
        return
    kind = wanted.partition(":")[0]
    held = [program.state[row.name] for row in program.signature.inputs if row.name in program.state]
    is_there = all(not isinstance(tensor, FakeTensor) for tensor in held)
    if is_there and torch.get_device_module(kind).is_available():
        return
    beside = "" if program.step is None else ", optimizer"
    raise UsageError(
        f"the program of {program.name} was captured for {wanted} and cannot run here",
        why="it was recorded from fake tensors alone, and its operators are those of that device",
        remedy=f"where that device is, run it on the model there: program.bind(model.to({kind!r}){beside}); "
        "to run here, capture without device",
    )


def meshes_elsewhere(program: FlatProgram) -> list[str]:
    """The meshes of DTensors, in words, that a program was loaded without: a file does not hold processes."""
    rows = {row.name: row.part for row in program.signature.state}
    wholes = [whole for whole in program.signature.wholes if whole.name not in program.state]
    parts = [part for whole in wholes if (part := rows.get(whole.parts[0])) is not None]
    specs = (program.convention.spec, program.out_spec)
    meshes = [*(mesh.axes for spec in specs for mesh in out_of_reach(spec)), *(part.mesh for part in parts)]
    return [", ".join(f"{name} of {size}" for name, size in axes) for axes in dict.fromkeys(meshes)]


def _refuse_without_processes(program: FlatProgram) -> None:
    if meshes := meshes_elsewhere(program):
        raise UsageError(
            f"the program of {program.name} was loaded without the processes of its DTensors",
            why=f"they lie on a mesh with the axes {'; '.join(meshes)}, and a file holds the tensors of one "
            "process alone",
            remedy="whence.load(path, model=model) with a model that is spread alike, in a process of that "
            "mesh; or capture it there again",
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


def state_of_loss(program: FlatProgram) -> tuple[Input, ...]:
    """The state that no module of the model holds, and the loss function does."""
    known = {record.path for record in program.modules}
    rows = program.signature.state if program.loss_function is not None else ()
    return tuple(row for row in rows if row.module is not None and row.module not in known)


def bound_state(program: FlatProgram, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The program's state with tensors of another model in place of the captured ones, by qualified name."""
    rows = [(row.name, (row.path, *row.aliases)) for row in program.signature.state]
    wholes = (row for row in program.signature.wholes if row.tensor is not None or row.path in tensors)
    rows += [(row.name, (row.path, *row.aliases)) for row in wholes]
    found = {name: next((path for path in paths if path in tensors), None) for name, paths in rows}
    return {name: program.state[name] if path is None else tensors[path] for name, path in found.items()}


def deep_copy(program: P, memo: dict[int, Any]) -> P:
    """The program with a graph and tensors of its own; facts about the capture are the same for both.

    Graphs are long chains of nodes, and those of tensors that a tracer made: neither is to be walked by
    `copy.deepcopy`.
    """
    copy_results(program.state.values(), memo)
    wholes = tuple(replace(whole, tensor=deepcopy(whole.tensor, memo)) for whole in program.signature.wholes)
    state = _state(program.state, wholes, memo)
    held = {row.path: state[row.name] for row in program.signature.attributes}
    graph = own_copy(program.graph_module, program.name, held)
    signature = replace(program.signature, wholes=wholes)
    variants = tuple(deep_copy(each, memo) for each in program.variants)
    return program.with_changes(graph_module=graph, signature=signature, state=state, variants=variants)


def copy_results(tensors: Iterable[Any], memo: dict[int, Any]) -> dict[int, Any]:
    """The memo with copies of tensors that `copy.deepcopy` refuses: those that something computed.

    So is a constant that requires a gradient, in an exported program that was loaded. A copy begins anew.
    """
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not tensor.is_leaf and id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_()
    return memo


def _state(state: Mapping[str, Tensor], wholes: tuple[Whole, ...], memo: dict[int, Any]) -> dict[str, Tensor]:
    """Copies of all tensors; parts of a tensor that is made of others are those of its copy."""
    parts: dict[str, Any] = {}
    for whole in wholes:
        if whole.tensor is not None:
            parts |= dict(zip(whole.parts, (part for _, part in plain_parts(whole.tensor)), strict=True))
            parts[whole.name] = whole.tensor
    return {name: parts[name] if name in parts else deepcopy(held, memo) for name, held in state.items()}


def refuse_pickling(what: str) -> NoReturn:
    """Raise `CallError` for what another process would make something else of."""
    raise CallError(
        f"{what} cannot be pickled",
        why="its modules are of classes whose own code would run in the place of what was captured",
        remedy="pickle program.unflatten(), or save the program, program.save(path), and its state_dict",
    )
