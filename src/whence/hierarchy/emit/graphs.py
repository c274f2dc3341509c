"""Show a body as an fx graph: its own operations, and one `call_module` for each call inside it."""

import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from whence._torch.graphs import nested_graph, with_code
from whence._torch.record.annotations import CUSTOM, common_annotations
from whence.hierarchy.plan.plan import Body, Plan, pack_label, packed_call
from whence.hierarchy.run.captured import Inside, body_of, captured_of
from whence.hierarchy.run.interface import Interface
from whence.hierarchy.swap.preserved import CallPlace
from whence.hierarchy.swap.unpreserved import in_place_of
from whence.program import Named
from whence.program.node_records import origin_of, set_origin
from whence.schema import Phase

if TYPE_CHECKING:
    from whence.hierarchy.emit.calls import CallBody


def as_graph(plan: Plan, phase: Phase, number: int) -> fx.Graph:
    """The graph of one call in one phase, for people and passes to read."""
    body = plan.body(phase, number)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for name in (*body.kept, *body.inputs) if phase is Phase.BACKWARD else body.inputs:
        made[name] = graph.placeholder(label(plan, name))
    for name, path in body.reads:
        made[name] = graph.create_node("get_attr", str(path), name=name)
    for step in body.steps:
        if isinstance(step, str):
            for source in plan.nodes[step].all_input_nodes:
                if source.name not in made:  # the graph of a branch or loop
                    made[source.name] = graph.node_copy(source)
            made[step] = graph.node_copy(plan.nodes[step], lambda node: made[node.name])
        else:
            _add_call(graph, plan, phase, (number, step), made)
    for name, node in made.items():
        if name in plan.nodes and "val" in plan.nodes[name].meta:
            node.meta["val"] = plan.nodes[name].meta["val"]
            set_origin(node, origin_of(plan.nodes[name]))
    graph.output(tuple(made[name] for name in _results_of_body(phase, body)))
    return graph


def _results_of_body(phase: Phase, body: Body) -> tuple[str, ...]:
    return (*body.outputs, *body.kept) if phase is Phase.FORWARD else body.outputs


def _add_call(
    graph: fx.Graph, plan: Plan, phase: Phase, edge: tuple[int, int], made: dict[str, fx.Node]
) -> None:
    caller, called = (plan.site(number) for number in edge)
    given = plan.gives(phase, edge[1])
    inside = called.path.is_within(caller.path)
    path = called.path.relative_to(caller.path) if inside else called.path
    target = str(replace(called, path=path))
    arguments = tuple(made[name] for name in plan.takes(phase, edge[1]))
    node = graph.create_node("call_module", target, arguments, name="_".join(path) or "root")
    said = _said_of(plan, phase, edge[1])
    if said:
        node.meta[CUSTOM] = said
    node.meta["val"] = tuple(_fake_value(plan, name) for name in given)
    for position, name in enumerate(given):
        made[name] = graph.create_node(
            "call_function", operator.getitem, (node, position), name=label(plan, name)
        )
        made[name].meta["val"] = node.meta["val"][position]


def _fake_value(plan: Plan, name: str) -> Any:
    """The fake value of a name; of what a call keeps, all of its values."""
    call = packed_call(name)
    if call is None:
        return plan.nodes[name].meta.get("val")
    return tuple(_fake_value(plan, kept) for kept in plan.body(Phase.FORWARD, call).kept)


def _said_of(plan: Plan, phase: Phase, number: int) -> dict[str, Any]:
    """What annotations say of everything that a call computes in a phase, alike."""
    ends = plan.program.calls.ends
    inside = range(number, ends[number] if number < len(ends) else number + 1)
    return common_annotations(
        node
        for owner in inside
        for node in plan.operations.get((phase, owner), ())
        if node.op == "call_function"
    )


def label(plan: Plan, name: str) -> str:
    """What a value is called in a printed graph: its name in the program, or whose values it keeps."""
    return pack_label(name, lambda number: "_".join(plan.site(number).path[-1:]))


def interpreted(call: "CallBody", module: nn.Module) -> fx.Graph:
    """The forward of a call on flat arguments in the order of the original's, state read where it is.

    It returns flat results in their order, behind the loss if there is one, and then everything else that
    leaves the call: new values of state, which it does not write, and what a backward needs.
    """
    graph, body = as_graph(call.plan, Phase.FORWARD, call.number), call.call_plan.forward
    values = dict(zip(body.inputs, graph.find_nodes(op="placeholder"), strict=True))
    results = dict(zip((*body.outputs, *body.kept), graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    calls = [step for step in body.steps if isinstance(step, int)]
    for node, number in zip(graph.find_nodes(op="call_module"), calls, strict=True):
        _make(node, call.plan, (call.number, number), module)
    for node in graph.find_nodes(op="get_attr"):
        if (inside := nested_graph(call.plan.nodes.get(node.name, node))) is not None:
            _put(node, with_code(inside))
    interface = call.interface
    if interface is not None and not interface.hidden:
        state = {row.name: row.path for row in call.plan.program.signature.state}
        _arranged(graph, interface, (values, results), state)
    return graph


def _make(node: fx.Node, plan: Plan, edge: tuple[int, int], module: nn.Module) -> None:
    """Make a call inside: on a captured module as the tree does, on another as the original was called."""
    around, path = (plan.site(number).path for number in edge)
    within = path.is_within(around)
    held = (module if within else captured_of(module).whence_root).get_submodule(
        str(path.relative_to(around) if within else path)
    )
    if within and body_of(held, plan, edge[1]) is not None:
        named: Any = (Inside, edge[1], *node.args)
        node.target, node.args = str(path.relative_to(around)), named
        return
    function = partial(held, Inside, edge[1])
    arguments: Any = node.args
    if body_of(held, plan, edge[1]) is None:
        function, arguments = partial(in_place_of(CallPlace(plan, edge[1])).forward, held), (node.args,)
    with node.graph.inserting_before(node):
        made = node.graph.create_node("call_function", function, arguments, name=node.name)
    made.meta = node.meta
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _put(node: fx.Node, value: object) -> None:
    """Put the graph of a branch in the place of the node that reads it."""
    for user in list(node.users):
        exchange: Any = lambda argument: value if argument is node else argument  # noqa: E731
        user.args, user.kwargs = fx.map_arg(user.args, exchange), fx.map_arg(user.kwargs, exchange)
    node.graph.erase_node(node)


def _arranged(
    graph: fx.Graph,
    interface: Interface,
    border: tuple[dict[str, fx.Node], Mapping[str, fx.Node]],
    state: Mapping[str, str],
) -> None:
    """Put arguments and results in the order of the original's; `state` says where what is returned is."""
    values, results = border
    after = next(node for node in graph.nodes if node.op != "placeholder")
    given: dict[str, fx.Node] = {}
    for at, name in enumerate(interface.leaves):
        with graph.inserting_before(after):
            node = values.pop(name, None) if name else None
            node = graph.placeholder(f"{name or 'constant'}_{at}") if node is None else node
        after.prepend(node)
        given.setdefault(name or "", node)
    for name, path in interface.state:
        with graph.inserting_before(after):
            held = graph.create_node("get_attr", str(path))
        held.meta = values[name].meta
        values[name].replace_all_uses_with(held)
        graph.erase_node(values.pop(name))
    returned = (leaf.name for leaf in interface.result.leaves if isinstance(leaf, Named))
    first = [name for name in (interface.loss, *returned) if name is not None]
    known = {**given, **results}
    with graph.inserting_before(graph.output_node()):
        known |= {name: graph.create_node("get_attr", state[name]) for name in first if name not in known}
    shown = [known[name] for name in first]
    shown += [node for name, node in results.items() if name not in first]
    graph.output_node().args = (tuple(shown),)
