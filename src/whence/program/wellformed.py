"""The rules every program keeps, checked."""

from collections.abc import Callable, Iterator

from torch import fx

from whence._torch.graphs import nested_graph
from whence._torch.operators import op_name, traits, written_arguments
from whence.errors import MalformedProgram
from whence.program.origins import origin_of
from whence.program.program import Program
from whence.schema import Phase, Quality

_REMEDY = (
    "mend the graph where it was changed; if nobody changed it, this is a mistake of ours: please report it"
)
Rule = Callable[[Program], Iterator[str]]


def check(program: Program) -> None:
    """Raise `MalformedProgram` naming every broken rule."""
    faults = [fault for rule in RULES for fault in rule(program)]
    if faults:
        raise MalformedProgram(
            f"the program {program.name} is malformed", why="; ".join(faults[:20]), remedy=_REMEDY
        )


def inputs_match(program: Program) -> Iterator[str]:
    """One input per placeholder, in order."""
    placeholders = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    rows = [row.name for row in program.signature.inputs]
    if placeholders != rows:
        differing = list({*placeholders} ^ {*rows}) or ["their order"]
        yield f"placeholders and inputs differ: {', '.join(sorted(differing))}"


def attributes_match(program: Program) -> Iterator[str]:
    """One attribute row per `get_attr` node that reads no nested graph."""
    attributes = (node for node in program.graph.nodes if node.op == "get_attr")
    read = {node.name for node in attributes if nested_graph(node) is None}
    rows = {row.name for row in program.signature.attributes}
    if read - rows:
        yield f"get_attr nodes without a row: {', '.join(sorted(read - rows))}"


def outputs_match(program: Program) -> Iterator[str]:
    """One output row per returned value, in order."""
    returned = _returned(program.graph)
    rows = program.signature.outputs
    if len(returned) != len(rows):
        yield f"{len(returned)} values are returned, {len(rows)} are described"
        return
    for value, row in zip(returned, rows, strict=True):
        held = value.name if isinstance(value, fx.Node) else None
        if held != row.node:
            yield f"output {row.name} is {held}, not {row.node}"


def _returned(graph: fx.Graph) -> tuple[object, ...]:
    last = next(iter(reversed(graph.nodes)), None)
    return tuple(last.args[0]) if last is not None and last.op == "output" else ()


def origins_present(program: Program) -> Iterator[str]:
    """Every operation says where it came from."""
    for node in program.graph.nodes:
        if node.op == "call_function" and origin_of(node).quality is Quality.NONE:
            yield f"{node.name} has no origin"


def origins_known(program: Program) -> Iterator[str]:
    """The calls and forward nodes that origins name exist."""
    names = {node.name for node in program.graph.nodes}
    made = {id(call.site) for call in program.calls}
    sites = {(call.site.path, call.site.index) for call in program.calls}
    for node in program.graph.nodes:
        origin = origin_of(node)
        if origin.forward is not None and origin.forward not in names:
            yield f"{node.name} differentiates {origin.forward}, which does not exist"
        for site in (*origin.calls, origin.place):
            if site is None or id(site) in made:
                continue
            if (site.path, site.index) not in sites:
                yield f"{node.name} comes from a call that was not made"


def is_functional(program: Program) -> Iterator[str]:
    """No node changes an input."""
    for node in program.graph.nodes:
        if node.op != "call_function" or not traits(node.target).mutates:
            continue
        if written_arguments(node.target, node.args, node.kwargs):
            yield f"{node.name} ({op_name(node.target)}) changes an input"


def phases_in_order(program: Program) -> Iterator[str]:
    """No forward operation reads a backward one."""
    later = {
        node
        for node in program.graph.nodes
        if node.op == "call_function" and origin_of(node).phase is not Phase.FORWARD
    }
    for node in later:
        for user in node.users:
            if user.op == "call_function" and user not in later:
                yield f"{user.name} runs in the forward and reads {node.name} of the backward"


RULES: tuple[Rule, ...] = (
    inputs_match,
    attributes_match,
    outputs_match,
    origins_present,
    origins_known,
    is_functional,
    phases_in_order,
)
