"""How a call is made alone: by the signature that the export kept, or else by what crosses its border.

torch.export keeps the calling convention of the modules that were asked for. Of any other call it is known
what its operations read and what others read of them: it takes these values by position, in the order they
are first used, and returns its one result or the tuple of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx

from whence._torch.graphs import value_inputs
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.symbols import is_symbolic, names_in, spelled
from whence.program import Absent, Call, Calls, Constant, FlatProgram, Named, Structure
from whence.program.calls import Leaf
from whence.program.node_records import origin_of
from whence.provenance import ROOT, ModulePath
from whence.provenance.places import ancestors
from whence.schema import InputKind, Phase

NO_LEAF = Absent("nothing in the program uses this value")


@dataclass(frozen=True)
class StateUses:
    """What modules find in themselves: the paths of each piece of state, and of each of its values."""

    paths: Mapping[str, tuple[ModulePath, ...]]

    def by(self, name: str, module: ModulePath) -> bool:
        """Whether a module holds a value as its state."""
        return any(path.is_within(module) for path in self.paths.get(name, ()))


@dataclass(frozen=True)
class KeptConvention:
    """The calling convention of one call as the export kept it, over the values of the program."""

    inputs: Structure
    outputs: Structure


KeptConventions = Mapping[tuple[ModulePath, int], KeptConvention]
_NOTHING_KEPT: KeptConventions = MappingProxyType({})


def _state_uses(program: FlatProgram) -> StateUses:
    """What the modules of a program find in themselves; what it returns they hand out."""
    paths = {row.name: row.attribute_paths for row in program.signature.state}
    versions = {value: paths[name] for value, name in program.facts.holders.items() if name in paths}
    results = set(program.result.names)
    return StateUses({name: found for name, found in {**paths, **versions}.items() if name not in results})


def _whole_call(program: FlatProgram) -> KeptConvention:
    users = tuple(Named(row.name) for row in program.signature.inputs_of(InputKind.USER))
    return KeptConvention(Structure(program.convention.spec, users), program.result)


def with_structures(program: FlatProgram, kept: KeptConventions = _NOTHING_KEPT) -> Calls:
    """The calls of a program with the structure of what their forwards take and return.

    `kept` are the conventions that are known of single calls.
    """
    calls, results = program.calls, set(program.result.names)
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    places = {node: origin.place for node in nodes if (origin := origin_of(node)).phase is Phase.FORWARD}
    homes = {node: calls.number(place) for node, place in places.items()}
    taken: dict[int, dict[str, fx.Node]] = {call.number: {} for call in calls}
    given: dict[int, dict[str, None]] = {call.number: {} for call in calls}
    for node, home in homes.items():
        for source in value_inputs(node):
            _cross(calls, source, homes.get(source, 0), home, (taken, given))
        if node.name in results:
            _leave(calls, node.name, home, 0, given)
    held, kept = _state_uses(program), {**kept, (ROOT, 0): _whole_call(program)}
    rows = (calls.program, *(_call_with_values(row, taken, given, held, kept) for row in calls))
    return replace(calls, rows=rows)


def _cross(
    calls: Calls, source: fx.Node, maker: int, user: int, crossing: tuple[dict[int, Any], dict[int, Any]]
) -> None:
    taken, given = crossing
    around = set(ancestors(calls.parents, maker))
    for number in ancestors(calls.parents, user):
        if number in around:
            _leave(calls, source.name, maker, number, given)
            return
        taken[number][source.name] = source


def _leave(calls: Calls, name: str, maker: int, until: int, given: dict[int, Any]) -> None:
    for number in ancestors(calls.parents, maker):
        if number in (until, 0):
            return
        given[number][name] = None


def _call_with_values(
    row: Call,
    taken: Mapping[int, dict[str, fx.Node]],
    given: Mapping[int, dict[str, None]],
    held: StateUses,
    kept: KeptConventions,
) -> Call:
    module = row.site.path
    read = {name: node for name, node in taken[row.number].items() if not held.by(name, module)}
    inputs = [name for name, node in read.items() if not follows(node, read.values())]
    outputs = [name for name in given[row.number] if not held.by(name, module)]
    known = kept.get((module, row.site.index))
    if known is not None and set(inputs) <= {*known.inputs.names} and set(outputs) <= {*known.outputs.names}:
        return replace(row, inputs=known.inputs, outputs=known.outputs)
    _, spec = tree_flatten((tuple(inputs), {}))
    leaves = tuple(map(Named, inputs))
    return replace(row, inputs=Structure(spec, leaves), outputs=_result_of_names(outputs))


def follows(node: fx.Node, read: Iterable[fx.Node]) -> bool:
    """Whether a value is a size that the others tell."""
    size = node.meta.get("val")
    if not is_symbolic(size):
        return False
    tensors = [held for each in read if isinstance(held := each.meta.get("val"), Tensor)]
    shown = {spelled(axis) for tensor in tensors for axis in tensor.shape if is_symbolic(axis)}
    return names_in(size) <= shown


def _result_of_names(names: list[str]) -> Structure:
    leaves: tuple[Leaf, ...] = tuple(map(Named, names)) or (Constant(None),)
    _, spec = tree_flatten(tuple(names) if len(names) > 1 else "value")
    return Structure(spec, leaves)


def leaves_of(arguments: Any, values: Mapping[str, Any]) -> Iterator[Leaf]:
    """The arguments of a signature that the export kept, as values of the program."""
    for argument in arguments:
        if hasattr(argument, "value"):
            yield Constant(argument.value)
            continue
        yield leaf_of(values.get(argument.name, NO_LEAF))


def leaf_of(value: Any) -> Leaf:
    """A value of the program as a leaf."""
    match value:
        case fx.Node():
            return Named(value.name)
        case Absent():
            return value
    return Constant(value)
