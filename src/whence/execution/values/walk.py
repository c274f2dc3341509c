"""A program's graph, node by node, over real values."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.graphs import nested_graph
from whence._torch.observe.generators import set_states, states
from whence._torch.pytrees import tree_map_only
from whence._torch.subclasses.fully_sharded import whole
from whence._torch.subclasses.wrapper_subclasses import carries_gradients
from whence.errors import UsageError
from whence.hierarchy.emit.differentiable import straight_through, with_gradients, without_gradients
from whence.hierarchy.emit.source import run_as
from whence.program import FlatProgram
from whence.program.queries.failing import OF_OPERATIONS, refuse_failed
from whence.program.queries.memory_order import with_gathered
from whence.program.signature import Input
from whence.program.state import refuse_elsewhere
from whence.schema import InputKind, OutputKind

Given = tuple[tuple[Any, ...], Mapping[str, Any] | None, Mapping[str, Any]]
"""Arguments, positional and by name, and other inputs by name or path."""
Patch = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Takes the values so far, by name of node, and returns those that take the place of some."""


def walk(
    program: FlatProgram,
    inputs: Mapping[str, Any],
    *,
    patches: Mapping[str, Patch] | None = None,
    keep: frozenset[str] = frozenset(),
) -> Iterator[tuple[fx.Node, Mapping[str, Any]]]:
    """Every node of the graph in order, with the values that are there once it has run.

    A value goes after its last use, unless it is among `keep`. `inputs` gives each placeholder its value by
    name; a tangent that is not there is one everywhere, as of a sum. `patches` come after the node of that
    name. Some kernels are chosen by whether gradients are wanted. So a forward program runs as its module
    does, in the caller's grad mode and with state that requires gradients: detach what is kept. The graph of
    a joint program or a step holds the gradients; it runs on tensors that require none, in the mode that it
    was captured in.
    """
    values: dict[str, Any] = {}
    last = _last_uses(program.graph)
    tangents = _tangents(program)
    for node in program.graph.nodes:
        if node.op == "output":
            return
        if node.op == "placeholder" and node.name not in inputs:
            continue  # a tangent, which comes with the value that it belongs to
        values[node.name] = _computed_value(program, node, inputs, values)
        if patches and (patch := patches.get(node.name)) is not None:
            values.update(patch(values))
        for name in tangents.get(node.name, ()):
            if name not in inputs:
                values[name] = torch.ones_like(values[node.name])
        yield node, values
        for name in last.get(node, ()):
            if name not in keep:
                values.pop(name, None)


def _computed_value(
    program: FlatProgram, node: fx.Node, inputs: Mapping[str, Any], values: Mapping[str, Any]
) -> Any:
    if node.op == "placeholder":
        return inputs[node.name]
    if (branch := nested_graph(node)) is not None:
        return branch
    if node.op == "get_attr":
        return _leaf_over_memory(program, program.input(node.name), program.state[node.name])
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: values[source.name])
    try:
        return _operation(program, node)(*with_gathered(node, args), **kwargs)
    except OF_OPERATIONS as error:
        refuse_failed(program, error, node.name)
        raise


def _operation(program: FlatProgram, node: fx.Node) -> Callable[..., Any]:
    """What a node computes, in the grad mode that it has in the module of the program."""
    call: Callable[..., Any] = run_as(node.target)
    if node.name in program.facts.straight_through:
        call = partial(straight_through, call)
    if node.name in program.facts.turned_off:
        return partial(without_gradients, call)
    if _holds_gradients(program) or node.name in program.facts.turned_on:
        call = partial(with_gradients, call)
    return call


def _leaf_over_memory(program: FlatProgram, row: Input, held: Tensor) -> Any:
    """A leaf of its own over the memory of a tensor, which itself stays out of autograd's reach."""
    value: Tensor = whole(held.detach())
    if _holds_gradients(program) or value.is_inference():
        return value
    wanted = held.requires_grad if row.part is None else row.part.requires_grad and carries_gradients(held)
    return value.requires_grad_(wanted)


@contextmanager
def drawing_again(program: FlatProgram) -> Iterator[None]:
    """Every random generator, also those of the program's devices, is afterwards where it was before: the
    next run draws the same."""
    values = [*program.state.values(), *(row.value for row in program.signature.inputs)]
    devices = {value.device for value in values if isinstance(value, Tensor)}
    before = states()
    with ExitStack() as stack:
        for kind in {device.type for device in devices} - {"cpu", "meta"}:
            numbers = [device.index or 0 for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng([*{*numbers}], device_type=kind))
        stack.callback(set_states, before)
        yield


def detached(value: Any) -> Any:
    """A value of a node that holds on to nothing of the run."""
    return tree_map_only(Tensor, Tensor.detach, value)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """For each node the values that nothing reads after it."""
    found: dict[fx.Node, list[str]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                found.setdefault(node, []).append(source.name)
    return found


def _tangents(program: FlatProgram) -> dict[str, list[str]]:
    """The tangents of each value that the captured callable returns."""
    nodes = {row.name: row.node for row in program.signature.outputs_of(OutputKind.USER)}
    found: dict[str, list[str]] = {}
    for row in program.signature.inputs_of(InputKind.TANGENT):
        if row.of is not None and (node := nodes.get(row.of)) is not None:
            found.setdefault(node, []).append(row.name)
    return found


def inputs_of(
    program: FlatProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, others: Mapping[str, Any]
) -> dict[str, Any]:
    """A value for each placeholder: the program's state, these arguments, and `others` by name or path.

    Raises `CallError` for arguments that do not fit, `SelectionError` for others that are no inputs, and
    `UsageError` naming every input that has no value: the state of an optimizer is none of the program's.
    """
    refuse_elsewhere(program)
    users = iter(program.convention.flatten(args, dict(kwargs or {})))
    values: dict[str, Any] = {}
    for row in program.signature.inputs:
        if row.name in program.state:
            values[row.name] = _leaf_over_memory(program, row, program.state[row.name])
        elif row.kind is InputKind.USER:
            value = next(users)
            values[row.name] = value if row.part is None else _leaf_over_memory(program, row, value)
    values |= {program.input(name).name: value for name, value in others.items()}
    rows = [row for row in program.signature.inputs if row.kind is not InputKind.TANGENT]
    if missing := [row.path for row in rows if row.name not in values]:
        raise UsageError(
            f"no value is given for {', '.join(missing)}",
            remedy="give inputs={path: tensor} for each of them, or the optimizer of a step, optimizer=…",
        )
    if not _holds_gradients(program):
        return values
    return {name: held.detach() if isinstance(held, Tensor) else held for name, held in values.items()}


def _holds_gradients(program: FlatProgram) -> bool:
    return program.has_backward or program.step is not None
