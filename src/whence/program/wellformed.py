"""The rules every program keeps, checked."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from whence._torch.graphs import nested_graph, returned
from whence._torch.operators.schemas import op_name, traits, written_arguments
from whence._torch.sizes.symbols import SYMBOLIC
from whence.errors import MalformedProgram
from whence.program.node_records import has_origin, origin_of
from whence.program.program import FlatProgram
from whence.program.queries.printing import marked
from whence.program.signature import describe
from whence.provenance import Origin
from whence.schema import Phase, Quality

_REMEDY = (
    "mend the graph where it was changed; if nobody changed it, this is a mistake of ours: please report it"
)
_STATE = (
    "give the program the tensors of its model: whence.load(path, model=...) for one that was saved without "
    "weights, program.with_changes(state=...) by the names of inputs for any other"
)
_MANY = 20


@dataclass(frozen=True)
class Broken:
    """One thing that is wrong with a graph, at a node if there is one, and what to do."""

    what: str
    node: str | None = None
    remedy: str = ""


@dataclass(frozen=True)
class Looked:
    """A program with the nodes of its graph and their origins: gone through once, for all rules."""

    program: FlatProgram
    nodes: Sequence[fx.Node]
    origins: Sequence[Origin]
    operations: Sequence[tuple[fx.Node, Origin]]


Rule = Callable[[Looked], Iterator[Broken]]


def check(program: FlatProgram) -> None:
    """Raise `MalformedProgram` naming every broken rule, with the message at each node."""
    broken = faults(program)
    if broken:
        raise _malformed(program, broken)


def _malformed(program: FlatProgram, broken: Sequence[Broken]) -> MalformedProgram:
    why = "; ".join(fault.what for fault in broken[:_MANY])
    remedy = "; ".join(dict.fromkeys(fault.remedy or _REMEDY for fault in broken))
    error = MalformedProgram(f"the program {program.name} is malformed", why=why, remedy=remedy)
    error.shown = shown(program.graph, broken)
    return error


def faults(program: FlatProgram, *, without_state: bool = False) -> list[Broken]:
    """Every broken rule, but for that on tensors where a program may be without them."""
    nodes = tuple(program.graph.nodes)
    origins = tuple(map(origin_of, nodes))
    pairs = zip(nodes, origins, strict=True)
    operations = [(node, origin) for node, origin in pairs if node.op == "call_function"]
    looked = Looked(program, nodes, origins, operations)
    rules = [rule for rule in RULES if not (without_state and rule is state_present)]
    return [fault for rule in rules for fault in rule(looked)]


def shown(graph: fx.Graph, broken: Iterable[Broken]) -> str:
    """The graph around what is wrong, with the message at each node."""
    notes: dict[str, list[str]] = {}
    for fault in list(broken)[:_MANY]:
        if fault.node is not None:
            notes.setdefault(fault.node, []).append(fault.what)
    return marked(graph, notes)


def inputs_match(looked: Looked) -> Iterator[Broken]:
    """One input per placeholder, in order."""
    placeholders = [node.name for node in looked.nodes if node.op == "placeholder"]
    rows = [row.name for row in looked.program.signature.inputs]
    if placeholders != rows:
        differing = list({*placeholders} ^ {*rows}) or ["their order"]
        here = next((name for name in placeholders if name in differing), None)
        yield Broken(f"placeholders and inputs differ: {', '.join(sorted(differing))}", here)


def attributes_match(looked: Looked) -> Iterator[Broken]:
    """One attribute row per `get_attr` node that reads no nested graph."""
    attributes = (node for node in looked.nodes if node.op == "get_attr")
    read = {node.name for node in attributes if nested_graph(node) is None}
    rows = {row.name for row in looked.program.signature.attributes}
    if read - rows:
        yield Broken(f"get_attr nodes without a row: {', '.join(sorted(read - rows))}", min(read - rows))
    if rows - read:
        yield Broken(f"attributes that no get_attr node reads: {', '.join(sorted(rows - read))}")


def state_present(looked: Looked) -> Iterator[Broken]:
    """One tensor for each piece of state, of the shape and dtype that the graph was made for."""
    for row in looked.program.signature.state:
        held = looked.program.state.get(row.name)
        if held is None:
            what = f"{row.path} is in the signature and not in the state"
            yield Broken(what, row.name, _STATE)
        elif (held.shape, held.dtype) != (row.value.shape, row.value.dtype):
            was, now = describe(row.value), describe(held)
            yield Broken(f"{row.path} was {was} at capture, and is {now} in the state", row.name, _STATE)


def outputs_match(looked: Looked) -> Iterator[Broken]:
    """One output row per returned value, in order."""
    values = returned(looked.program.graph) or ()
    rows = looked.program.signature.outputs
    if len(values) != len(rows):
        yield Broken(f"{len(values)} values are returned, {len(rows)} are described", "output")
        return
    for value, row in zip(values, rows, strict=True):
        held = value.name if isinstance(value, fx.Node) else None
        if held != row.node:
            yield Broken(f"output {row.name} is {held}, not {row.node}", held or "output")


def origins_present(looked: Looked) -> Iterator[Broken]:
    """Every operation says where it came from."""
    is_foreign = looked.program.circumstances.is_foreign
    for node, origin in looked.operations:
        if origin.quality is Quality.NONE and not (is_foreign and has_origin(node)):
            yield Broken(f"{node.name} has no origin", node.name)


def origins_resolve(looked: Looked) -> Iterator[Broken]:
    """The calls and forward nodes that origins name exist."""
    names = {None, *(node.name for node in looked.nodes)}
    sites = {(call.site.path, call.site.index) for call in looked.program.calls}
    origins = {id(origin): origin for origin in looked.origins}.values()  # which nodes share, as they do rows
    rows = {id(origin.calls): origin.calls for origin in origins}
    named = {id(site): site for calls in rows.values() for site in calls}
    named |= {id(origin.place): origin.place for origin in origins if origin.place is not None}
    lost = {key for key, site in named.items() if (site.path, site.index) not in sites}
    if not lost and names.issuperset([origin.forward for origin in origins]):
        return
    for node, origin in zip(looked.nodes, looked.origins, strict=True):
        if origin.forward not in names:
            what = f"{node.name} differentiates {origin.forward}, which does not exist"
            yield Broken(what, node.name)
        for site in (*origin.calls, origin.place):
            if id(site) in lost:
                yield Broken(f"{node.name} comes from a call that was not made", node.name)


def is_functional(looked: Looked) -> Iterator[Broken]:
    """No node changes an input."""
    targets = {id(node.target): node.target for node, _ in looked.operations}
    changing = {key for key, target in targets.items() if traits(target).mutates}
    for node, _ in looked.operations if changing else ():
        if id(node.target) in changing and written_arguments(node.target, node.args, node.kwargs):
            yield Broken(f"{node.name} ({op_name(node.target)}) changes an input", node.name)


def values_in_order(looked: Looked) -> Iterator[Broken]:
    """No node reads what a later one gives."""
    before: set[fx.Node] = set()
    for node in looked.nodes:
        before.add(node)
        if not before.issuperset(node.all_input_nodes):
            late = next(read for read in node.all_input_nodes if read not in before)
            yield Broken(f"{node.name} reads {late.name}, which comes after it", node.name)


def sizes_are_nodes(looked: Looked) -> Iterator[Broken]:
    """Where sizes are open, what is computed with them is a node: a symbol has no value in a run."""
    if looked.program.convention.sizes is None:
        return
    for node in looked.program.nodes():
        symbols: list[object] = []
        fx.node.map_aggregate((node.args, node.kwargs), partial(_note_symbol, symbols))
        if symbols:
            yield Broken(f"{node.name} is given {symbols[0]}, which no node computes", node.name)


def _note_symbol(found: list[object], value: Any) -> Any:
    if isinstance(value, SYMBOLIC):
        found.append(value)
    return value


def phases_in_order(looked: Looked) -> Iterator[Broken]:
    """No forward operation reads a backward one; but a step may run several forwards."""
    if looked.program.step is not None:
        return
    phases = [origin.phase for _, origin in looked.operations]
    forwards = phases.count(Phase.FORWARD)
    if Phase.FORWARD not in phases[forwards:]:  # all of them come before, and read nothing that comes after
        return
    later = {node for node, origin in looked.operations if origin.phase is not Phase.FORWARD}
    for user, origin in looked.operations:
        if origin.phase is Phase.FORWARD and not later.isdisjoint(read := user.all_input_nodes):
            for node in later.intersection(read):
                what = f"{user.name} runs in the forward and reads {node.name} of the backward"
                yield Broken(what, user.name)


RULES: tuple[Rule, ...] = (
    inputs_match,
    attributes_match,
    state_present,
    outputs_match,
    origins_present,
    origins_resolve,
    is_functional,
    values_in_order,
    sizes_are_nodes,
    phases_in_order,
)
