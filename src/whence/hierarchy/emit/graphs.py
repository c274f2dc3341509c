"""Show a body as an fx graph: its own operations, and one `call_module` for each call inside it."""

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from whence._torch.record.annotations import CUSTOM, common_annotations
from whence.hierarchy.plan.plan import Body, Plan, pack_label, packed_call
from whence.program.node_records import origin_of, set_origin
from whence.schema import Phase


def as_graph(plan: Plan, phase: Phase, number: int) -> fx.Graph:
    """The graph of one call in one phase, for people and passes to read."""
    body = plan.body(phase, number)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for name in _taken(phase, body):
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
    graph.output(tuple(made[name] for name in _given(phase, body)))
    return graph


def _taken(phase: Phase, body: Body) -> tuple[str, ...]:
    return (*body.kept, *body.inputs) if phase is Phase.BACKWARD else body.inputs


def _given(phase: Phase, body: Body) -> tuple[str, ...]:
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
    node.meta["val"] = tuple(_value(plan, name) for name in given)
    for position, name in enumerate(given):
        made[name] = graph.create_node(
            "call_function", operator.getitem, (node, position), name=label(plan, name)
        )
        made[name].meta["val"] = node.meta["val"][position]


def _value(plan: Plan, name: str) -> Any:
    """The fake value of a name; of what a call keeps, all of its values."""
    call = packed_call(name)
    if call is None:
        return plan.nodes[name].meta.get("val")
    return tuple(_value(plan, kept) for kept in plan.body(Phase.FORWARD, call).kept)


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
