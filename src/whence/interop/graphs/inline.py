"""One flat graph: the graphs that wrappers hold (regions without gradients, of autocast, of checkpoints)
become part of the graph around them, so that they hide no operation.

What a wrapper says about its region is kept for every operation in it. Graphs of control flow stay nested.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from whence._torch.export.programs import HigherOrderOperator
from whence._torch.graphs import attribute_at, name_exactly, own_copy
from whence._torch.operators.decompositions import Autocast
from whence._torch.operators.schemas import op_name
from whence.errors import Fault
from whence.interop.graphs.frames import STACK, segments


@dataclass(frozen=True)
class Region:
    """What wrappers say about an operation: whether it runs without gradients, and under which autocast."""

    without_grad: bool = False
    with_grad: bool = False
    autocast: tuple[Autocast, ...] = ()
    stack: Mapping[str, Any] | None = None


@dataclass
class Flat:
    """A graph without wrappers.

    `made` leads from the name of a node of the outermost graph to its value here: a node, a constant, or a
    tuple of them. `regions` are the wrappers around each node, `nested` the graphs of control flow by the
    name they are read under, and `returned` what the graph returns. `points` are the borders of modules whose
    calling convention was to be kept, and that torch.export left in the graph: values by path and side.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[str, Any] = field(default_factory=dict)
    regions: dict[fx.Node, Region] = field(default_factory=dict)
    nested: dict[str, fx.GraphModule] = field(default_factory=dict)
    returned: tuple[Any, ...] = ()
    points: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    @property
    def operations(self) -> list[fx.Node]:
        """The operations, without inputs and nested graphs."""
        return [node for node in self.graph.nodes if node.op == "call_function"]


Wrapped = tuple[str, tuple[Any, ...], Region]
"""The graph that a wrapper holds, by name, what the graph takes, and what the wrapper says about it."""


def _set_grad(node: fx.Node, around: Region) -> Wrapped:
    enabled, graph, *operands = node.args
    return (
        _target_name(graph),
        tuple(operands),
        replace(around, without_grad=not enabled, with_grad=bool(enabled)),
    )


def _autocast(node: fx.Node, around: Region) -> Wrapped:
    device, dtype, enabled, cache, graph, *operands = node.args
    region = Autocast(str(device), dtype, bool(enabled), cache)  # type: ignore[arg-type]
    return _target_name(graph), tuple(operands), replace(around, autocast=(*around.autocast, region))


def _wrapped_plainly(node: fx.Node, around: Region) -> Wrapped:
    graph, *operands = node.args
    return _target_name(graph), tuple(operands), around


def _invoked(node: fx.Node, around: Region) -> Wrapped:
    graph, _, *operands = node.args
    return _target_name(graph), tuple(operands), around


def _hinted(node: fx.Node, around: Region) -> Wrapped:
    graph, operands = node.args[:2]
    return _target_name(graph), tuple(operands), around  # type: ignore[arg-type]


def _target_name(graph: Any) -> str:
    return str(graph.target)


TRACEPOINT = "_export_tracepoint"
_EFFECT = "with_effects"
WRAPPERS: dict[str, Callable[[fx.Node, Region], Wrapped]] = {
    "wrap_with_set_grad_enabled": _set_grad,
    "wrap_with_autocast": _autocast,
    "tag_activation_checkpoint": _wrapped_plainly,
    "wrap_activation_checkpoint": _wrapped_plainly,
    "wrap": _wrapped_plainly,
    "invoke_subgraph": _invoked,
    "hints_wrapper": _hinted,
}


def flattened(module: fx.GraphModule, placeholders: Mapping[str, Any], graph: fx.Graph) -> Flat:
    """The graph of `module` without wrappers, written into `graph`, over `placeholders` by old names."""
    flat = Flat(graph=graph, made=dict(placeholders))
    names = {node.name for node in module.graph.nodes}
    returned = _copy(flat, module, dict(placeholders), Region(), names, is_outermost=True)
    flat.returned = tuple(returned)
    return flat


def _copy(
    flat: Flat,
    module: fx.GraphModule,
    made: dict[str, Any],
    region: Region,
    names: set[str],
    *,
    is_outermost: bool,
) -> Any:
    """Copy the operations of one graph; what it returns."""
    returned: Any = ()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            returned = fx.map_arg(node.args[0], lambda source: made[source.name])
        elif node.op == "get_attr":
            made[node.name] = _nested_graph(flat, module, node)
        elif op_name(node.target) == TRACEPOINT:
            made[node.name] = _passed(flat, node, made)
        elif (wrapped := _wrapped(node, region)) is not None:
            made[node.name] = _inlined(flat, module, wrapped, made, names)
        elif node.target is operator.getitem and isinstance(held := made[node.args[0].name], (tuple, list)):
            made[node.name] = held[node.args[1]]
        else:
            name = node.name if is_outermost or node.name not in names else f"{node.name}_inner"
            made[node.name] = _inlined_operation(flat, node, made, region, name)
            if op_name(node.target) == _EFFECT:
                made[node.name] = (None, *_results(flat, made[node.name], node.meta["val"][1:]))
        if is_outermost:
            flat.made[node.name] = made.get(node.name)
    return returned


def _passed(flat: Flat, node: fx.Node, made: Mapping[str, Any]) -> list[Any]:
    """The values that pass the border of a module, which the exporter marks by an operation."""
    values = [made[value.name] if isinstance(value, fx.Node) else value for value in node.args]
    path = str(segments(str(node.kwargs["path"])))
    flat.points[path, str(node.kwargs["kind"])] = values
    return values


def _wrapped(node: fx.Node, around: Region) -> Wrapped | None:
    if not isinstance(node.target, HigherOrderOperator):
        return None
    read = WRAPPERS.get(op_name(node.target))
    if read is None or not any(
        isinstance(argument, fx.Node) and argument.op == "get_attr" for argument in node.args
    ):
        return None
    return read(node, replace(around, stack=node.meta.get(STACK) or around.stack))


def _inlined(
    flat: Flat, module: fx.GraphModule, wrapped: Wrapped, made: dict[str, Any], names: set[str]
) -> Any:
    name, operands, region = wrapped
    inner = module.get_submodule(name)
    taken = [fx.map_arg(operand, lambda source: made[source.name]) for operand in operands]
    placeholders: Any = inner.graph.find_nodes(op="placeholder")  # type: ignore[operator, union-attr]
    inside = {node.name: value for node, value in zip(placeholders, taken, strict=False)}
    return _copy(flat, inner, inside, region, names, is_outermost=False)  # type: ignore[arg-type]


def _nested_graph(flat: Flat, module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """A graph of control flow under a name that nothing else has; wrappers' own are gone with them."""
    if all(_wrapped(user, Region()) is not None for user in node.users):
        return None
    held = attribute_at(module, str(node.target))
    if not isinstance(held, fx.GraphModule):
        flat.faults.append(
            Fault(
                f"{node.name} reads the attribute {node.target} of the graph",
                why="an exported program takes its state through placeholders",
                remedy="export the model again, or add the tensor to the signature in the pass that made it",
            )
        )
        return None
    copied = flat.graph.create_node("get_attr", str(node.target).replace(".", "_"), name=node.name)
    while copied.target in flat.nested:
        copied.target = f"{copied.target}_"
    flat.nested[str(copied.target)] = own_copy(held)
    copied.meta = dict(node.meta)
    return copied


def _results(flat: Flat, node: fx.Node, values: tuple[Any, ...]) -> Iterator[fx.Node]:
    """What an operation returns that tokens ordered among others: it stays where it ran without them."""
    node.meta["val"] = values[0] if len(values) == 1 else values or None
    for position, value in enumerate(values) if len(values) > 1 else ():
        item = flat.graph.call_function(operator.getitem, (node, position))
        item.meta = {**node.meta, "val": value}
        yield item
    yield from [node] if len(values) == 1 else []


def _inlined_operation(
    flat: Flat, node: fx.Node, made: Mapping[str, Any], region: Region, name: str
) -> fx.Node:
    target, given = node.target, node.args
    if op_name(target) == _EFFECT:
        _, target, *given = given  # type: ignore[assignment]
    args, kwargs = fx.map_arg((tuple(given), node.kwargs), lambda source: made[source.name])
    copied = flat.graph.create_node(node.op, target, args, kwargs, name)
    name_exactly(copied, name)
    copied.meta = dict(node.meta)
    if region.stack is not None and not copied.meta.get(STACK):
        copied.meta[STACK] = region.stack
    if region != Region():
        flat.regions[copied] = region
    return copied
