"""What a node of a program is: one typed record on the node itself, which copies of the node carry along.

Relations between values are spelled by the names of nodes, which copies of a graph keep; a pass that leaves
other names behind writes the records anew.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from whence.errors import Place
from whence.provenance import Origin
from whence.schema import Phase, Quality

RECORD = "whence"
"""The key of the record in the metadata of a node."""
_UNKNOWN = Origin(Phase.FORWARD, quality=Quality.NONE)
Names = tuple[str, ...]


class Contribution(NamedTuple):
    """One gradient that arrived for a value: its node, the call it came from, and the running sum."""

    node: str
    scope: int
    sum: str | None = None


class Adjoint(NamedTuple):
    """The gradient of one forward value: its contributions in order of arrival, and their total."""

    contributions: tuple[Contribution, ...]

    @property
    def total(self) -> str:
        """The node that holds the whole gradient."""
        last = self.contributions[-1]
        return last.sum or last.node


class NodeRecord(NamedTuple):
    """Where a node came from, and what its value is to others: a tuple, for every node has one.

    `adjoint` is the gradient of the value, and `unclear` are the calls, by number, that contributed to it
    where a pass merged contributions. `versions` are the values that this one is a later value of, after a
    write, each with its place in the row of them. `is_seed` starts the backward pass of a program captured
    with a loss. `is_differentiable` carried a gradient where modules exchanged it. In a forward-only program
    `is_straight_through` hands the gradient of its result to its first argument unchanged, and gradients of
    what `is_turned_on` are recorded whatever the caller's grad mode is; what `is_turned_off` hears that it is
    off, in a backward and a step, too. What `is_behind` writes behind autograd's back: what autograd has kept
    of its first argument is the new value from then on.
    """

    origin: Origin | None = None
    adjoint: Adjoint | None = None
    versions: tuple[tuple[str, int], ...] = ()
    unclear: frozenset[int] = frozenset()
    is_seed: bool = False
    is_differentiable: bool = False
    is_straight_through: bool = False
    is_turned_on: bool = False
    is_turned_off: bool = False
    is_behind: bool = False


_BLANK = NodeRecord()
_NOTHING_MORE = _BLANK[1:]


def record_of(node: fx.Node) -> NodeRecord:
    """What is known of a node; a blank record when nobody said anything."""
    record = node.meta.get(RECORD)
    return record if isinstance(record, NodeRecord) else _BLANK


def set_origin(node: fx.Node, origin: Origin | None) -> None:
    """Say where a node came from; None takes back what was said."""
    known = node.meta.get(RECORD)
    node.meta[RECORD] = NodeRecord(origin) if known is None else known._replace(origin=origin)


def origin_of(node: fx.Node) -> Origin:
    """Where a node came from; an origin of quality `none` when nobody said."""
    record = node.meta.get(RECORD)
    return _UNKNOWN if record is None else record.origin or _UNKNOWN


def constant_origin(node: fx.Node) -> Origin:
    """Where a constant came from: the call and the line of the operation that reads it first."""
    first = next((user for user in node.users if user.op == "call_function"), None)
    read = _UNKNOWN if first is None else origin_of(first)
    known = read.quality is not Quality.NONE
    return Origin(read.phase, read.calls, Quality.INFERRED, read.source) if known else _UNKNOWN


def has_origin(node: fx.Node) -> bool:
    """Whether somebody said where the node came from."""
    return record_of(node).origin is not None


def place_of(node: fx.Node) -> Place:
    """Where a node came from, for an error: its calls, and the user's line."""
    origin = origin_of(node)
    module = " + ".join(map(str, origin.calls)) if origin.calls else None
    return Place(module, str(origin.source) if origin.source else None)


@dataclass(frozen=True)
class GraphFacts:
    """What the records of a graph say together, by the names of nodes.

    `histories` lists, for each input that is written, the nodes that hold its successive values; `written`
    does the same for values in between. `unclear` pairs values with calls that contributed to their
    gradients.
    """

    seed: str | None = None
    adjoints: Mapping[str, Adjoint] = field(default_factory=dict)
    histories: Mapping[str, Names] = field(default_factory=dict)
    written: Mapping[str, Names] = field(default_factory=dict)
    differentiable: frozenset[str] = frozenset()
    straight_through: frozenset[str] = frozenset()
    turned_on: frozenset[str] = frozenset()
    turned_off: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()
    unclear: frozenset[tuple[str, int]] = frozenset()

    @cached_property
    def versions(self) -> dict[str, Names]:
        """The successive values of all that is written: inputs, and values in between."""
        return {**self.histories, **self.written}

    @cached_property
    def holders(self) -> dict[str, str]:
        """The input that each of its successive values belongs to."""
        return {value: name for name, values in self.histories.items() for value in values}

    def contributions(self, name: str) -> tuple[Contribution, ...]:
        """What arrived for the gradient of a value."""
        return self.adjoints[name].contributions if name in self.adjoints else ()


def write_facts(graph: fx.Graph, facts: GraphFacts) -> None:
    """Let the records of a graph say this, and nothing else but where their nodes came from."""
    said: dict[str, dict[str, Any]] = {}
    for name, adjoint in facts.adjoints.items():
        said.setdefault(name, {})["adjoint"] = adjoint
    for base, values in facts.versions.items():
        for place, name in enumerate(values):
            row = said.setdefault(name, {})
            row["versions"] = (*row.get("versions", ()), (base, place))
    for name, call in facts.unclear:
        row = said.setdefault(name, {})
        row["unclear"] = row.get("unclear", frozenset()) | {call}
    for kind, names in _marks(facts):
        for name in names:
            said.setdefault(name, {})[kind] = True
    for node in graph.nodes:
        known, more = node.meta.get(RECORD, _BLANK), said.get(node.name)
        if more or known[1:] != _NOTHING_MORE:
            node.meta[RECORD] = NodeRecord(known.origin, **(more or {}))


def _marks(facts: GraphFacts) -> Iterable[tuple[str, Iterable[str]]]:
    yield "is_seed", () if facts.seed is None else (facts.seed,)
    yield "is_differentiable", facts.differentiable
    yield "is_straight_through", facts.straight_through
    yield "is_turned_on", facts.turned_on
    yield "is_turned_off", facts.turned_off
    yield "is_behind", facts.behind


def facts_in(graph: fx.Graph) -> GraphFacts:
    """What the records of a graph say together."""
    records = {node.name: record_of(node) for node in graph.nodes}
    computed = {node.name for node in graph.nodes if node.op == "call_function"}
    versions: dict[str, list[tuple[int, str]]] = {}
    for name, record in records.items():
        for base, place in record.versions:
            versions.setdefault(base, []).append((place, name))
    rows = {base: tuple(name for _, name in sorted(values)) for base, values in versions.items()}
    return GraphFacts(
        seed=next((name for name, record in records.items() if record.is_seed), None),
        adjoints={name: record.adjoint for name, record in records.items() if record.adjoint is not None},
        histories={base: values for base, values in rows.items() if base not in computed},
        written={base: values for base, values in rows.items() if base in computed},
        differentiable=frozenset(name for name, record in records.items() if record.is_differentiable),
        straight_through=frozenset(name for name, record in records.items() if record.is_straight_through),
        turned_on=frozenset(name for name, record in records.items() if record.is_turned_on),
        turned_off=frozenset(name for name, record in records.items() if record.is_turned_off),
        behind=frozenset(name for name, record in records.items() if record.is_behind),
        unclear=frozenset((name, call) for name, record in records.items() for call in record.unclear),
    )
