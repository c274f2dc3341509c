"""Which module calls compute the same.

The region of a call is everything placed in it and in the calls inside it, in every phase. Two calls compute
the same when their regions agree node for node, in order: operation, constants, wiring, place within the
call, phase, quality, source line and what they differentiate; and when their borders agree: which values come
from outside and where each of them is used, what the module reads from itself under which name, and which
values are used outside. A value from outside may be any value of its phase with the same shape, dtype,
strides and device. Those of results then agree, because equal operations on equal inputs give equal results;
they are compared only where an operation reads no value at all.

A region is spelled as one flat tuple, its key, and equal keys are equal regions: no two regions are compared
with each other. Calls that the capture wrote from one record are known to be equal but for what it dropped or
joined afterwards, and only one of them is spelled, as long as nobody has edited the graph. Outermost calls
are spelled first, and of equal ones only the first is looked into, so the work is linear in nodes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from whence._torch.graphs import nested_graph
from whence.program.calls import Call
from whence.program.node_records import origin_of
from whence.program.replay import Copies
from whence.provenance import CallSite, Source
from whence.schema import InputKind, Phase

if TYPE_CHECKING:
    from whence.program.program import FlatProgram

NOT_PLACED = frozenset({"placeholder", "output", "get_attr"})
"""Kinds of nodes that no call holds."""
_BY_VALUE = frozenset(
    {int, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device}
)


def first_equal_calls(regions: "Regions") -> tuple[int, ...]:
    """For each call, by number, the first call that computes the same; itself where none before does."""
    known: dict[Any, int] = {}
    pairs: list[tuple[int, int]] = []
    waiting = regions.candidates([0])
    while waiting:
        leaders = {number: _leader(regions, number, known) for number in waiting}
        pairs += [(number, leader) for number, leader in leaders.items() if number != leader]
        waiting = regions.candidates(number for number, leader in leaders.items() if number == leader)
    return _first_of_each(regions.ends, pairs)


def _leader(regions: "Regions", number: int, known: dict[Any, int]) -> int:
    """The call whose region was spelled first among those that equal that of `number`."""
    for key in regions.keys(number):
        leader = known.setdefault(key, number)
        if leader != number:
            return leader
    return number


def _first_of_each(ends: Sequence[int], pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The lowest call among equal ones; where two calls are equal, so are the calls inside them, in order."""
    first = list(range(len(ends)))

    def lowest(number: int) -> int:
        while first[number] != number:
            first[number] = first[first[number]]
            number = first[number]
        return number

    for one, other in pairs:
        for offset in range(ends[one] - one):
            low, high = sorted((lowest(one + offset), lowest(other + offset)))
            first[high] = low
    return tuple(map(lowest, range(len(first))))


class Regions:
    """The regions of a program's calls, as far as they are the same for every question.

    `homes` gives the call that holds each node, and `own` the positions of the nodes of each call.
    """

    def __init__(self, program: "FlatProgram") -> None:
        self.program = program
        self.rows = program.calls.rows
        self.ends = program.calls.ends
        self.nodes = tuple(program.graph.nodes)
        self.by_name = {node.name: node for node in self.nodes}
        self.homes: dict[fx.Node, int] = {}
        self.own: list[list[int]] = [[] for _ in self.rows]
        self._place()
        self.sources: dict[Source | None, int] = {}
        self.state = {row.name: (row, row.attribute_paths) for row in program.signature.state}
        self._copies = None if (known := program.replay.known) is None else known.in_graph(program.graph)
        self.tangents = {
            program.facts.seed,
            *(row.name for row in program.signature.inputs_of(InputKind.TANGENT)),
        }

    def _place(self) -> None:
        numbers: dict[int, int] = {}  # by the identity of a call site, which many nodes share
        for position, node in enumerate(self.nodes):
            if node.op not in NOT_PLACED:
                place = origin_of(node).place
                number = numbers.get(id(place))
                if number is None:
                    number = numbers[id(place)] = self.program.calls.number(place)
                self.homes[node] = number
                self.own[number].append(position)

    def inside(self, number: int) -> list[fx.Node]:
        """The nodes of a region, in the order of the program."""
        return [self.nodes[at] for at in sorted(chain(*self.own[number : self.ends[number]]))]

    def candidates(self, around: Iterable[int]) -> list[int]:
        """The outermost calls inside these that might equal others."""
        return [number for caller in around for number in self._outermost(caller)]

    def keys(self, number: int) -> Iterator[tuple[Any, ...]]:
        """What two regions share if and only if they are equal; each key decides, the cheapest is first."""
        if self._copies is not None and number in self._copies.records and not self._shares_state(number):
            yield self._copies.records[number], *self._outline(self._copies, number)
        yield Key(self, number).spelled()

    def leaves(self, node: fx.Node, number: int, inside: set[fx.Node]) -> bool:
        """Whether something outside the region of a call, which holds `inside`, uses a node of it."""
        if not node.users.keys() <= inside:
            return True
        first, last = self._shown_by.get(node, (number, number))
        return first < number or last >= self.ends[number]

    def _outermost(self, caller: int) -> Iterator[int]:
        number = caller + 1
        while number < self.ends[caller]:
            kind = self._kinds[number]
            if kind and self._how_many[kind] > 1:
                yield number
                number = self.ends[number]
            else:
                number += 1

    def _outline(self, copies: Copies, number: int) -> Iterator[Any]:
        """What may differ between calls that were written from one record: what of it nothing needed, how far
        its values go, and where gradients from outside joined."""
        nodes, straight = self.inside(number), self.program.facts.straight_through
        modes = self.program.facts.turned_on, self.program.facts.turned_off
        inside = set(nodes)
        for node in nodes:
            yield copies.positions.get(node, node)
            yield self.homes[node] - number
            yield self.leaves(node, number, inside)
            yield len(origin_of(node).calls)
            if straight:
                yield node.name in straight
                yield node.name in self.program.facts.behind
            yield from (node.name in mode for mode in modes if mode)

    def _shares_state(self, number: int) -> bool:
        """Whether a call reads state that has several names or that the program writes: where else it is read
        may differ from call to call."""
        return any(number <= home < self.ends[number] for home in self._sharing)

    @cached_property
    def _sharing(self) -> frozenset[int]:
        shared = [name for name, (_, paths) in self.state.items() if len(paths) > 1]
        placeholders = (self.by_name[name] for name in (*shared, *self.program.facts.histories))
        return frozenset(
            self.homes[user] for node in placeholders for user in node.users if user in self.homes
        )

    def _shown(self, call: Call) -> Iterator[fx.Node]:
        written, taken = self.program.facts.written, call.inputs.names if call.inputs else ()
        names = [*(call.outputs.names if call.outputs else ()), *chain(*(written.get(n, ()) for n in taken))]
        return (self.by_name[name] for name in names if name in self.by_name)

    @cached_property
    def shown(self) -> list[tuple[fx.Node, ...]]:
        """The values that each call hands to its caller, used or not."""
        return [tuple(self._shown(row)) for row in self.rows]

    @cached_property
    def _shown_by(self) -> dict[fx.Node, tuple[int, int]]:
        """The first and the last call that hands out a node; the program is one of them."""
        returned = [row.node for row in self.program.signature.outputs if row.node is not None]
        names = chain(returned, *self.program.facts.histories.values())
        shown = {self.by_name[name]: (0, 0) for name in names if name in self.by_name}
        for number, nodes in enumerate(self.shown):
            for node in nodes:
                first, _ = shown.get(node, (number, number))
                shown[node] = (first, number)
        return shown

    @cached_property
    def _how_many(self) -> Counter[int]:
        return Counter(self._kinds)

    @cached_property
    def _kinds(self) -> list[int]:
        """A number for each call; equal calls have the same one, and a call that holds nothing has 0."""
        known: dict[Any, int] = {}
        kinds = [0] * len(self.rows)
        for row in reversed(self.rows):
            operations = tuple(id(self.nodes[at].target) for at in self.own[row.number])
            within = tuple(kinds[child.number] for child in self.program.calls.children(row))
            if operations or any(within):
                kinds[row.number] = known.setdefault((row.site.type, operations, within), len(known) + 1)
        return kinds


@dataclass
class Key:
    """Spells one region. Values are numbered: those of the region from 0 up, others from -1 down."""

    regions: Regions
    number: int
    entries: list[Any] = field(default_factory=list)
    values: dict[fx.Node, int] = field(default_factory=dict)
    outer_calls: dict[int, int] = field(default_factory=dict)

    def spelled(self) -> tuple[Any, ...]:
        """The key."""
        nodes = self.regions.inside(self.number)
        inside = set(nodes)
        for position, node in enumerate(nodes):
            self._node(node, self.regions.leaves(node, self.number, inside))
            self.values[node] = position
        for call in self.regions.rows[self.number : self.regions.ends[self.number]]:
            self._call(call)
        return tuple(self.entries)

    def _node(self, node: fx.Node, leaves: bool) -> None:
        """What is there once is told apart by its identity, which costs less than its hash."""
        regions, origin = self.regions, origin_of(node)
        arguments, keywords = node.args, node.kwargs
        self.entries += (
            id(node.target),
            regions.homes[node] - self.number,
            leaves,
            node.name in regions.program.facts.straight_through,
            node.name in regions.program.facts.behind,
            node.name in regions.program.facts.turned_on,
            node.name in regions.program.facts.turned_off,
            id(origin.phase),
            id(origin.quality),
            regions.sources.setdefault(origin.source, len(regions.sources)),
            origin.recomputed,
            origin.hook,
            None if node.all_input_nodes else _value_layout(node.meta.get("val")),
            len(arguments),
            len(keywords),
        )
        for argument in arguments:
            self._argument(argument)
        for name, argument in keywords.items():
            self.entries.append(name)
            self._argument(argument)
        if len(origin.calls) != 1 or origin.calls[0] is not origin.place:
            self.entries += ("made by", *map(self._maker, origin.calls))
        if origin.forward is not None:
            forward = regions.by_name.get(origin.forward)
            self.entries += ("of", None if forward is None else self._value(forward))

    def _maker(self, site: CallSite) -> int:
        number = self.regions.program.calls.number(site)
        if self.number <= number < self.regions.ends[self.number]:
            return number - self.number
        return self.outer_calls.setdefault(number, -1 - len(self.outer_calls))

    def _argument(self, argument: Any) -> None:
        kind = type(argument)
        if kind is fx.Node:
            self.entries.append(self._value(argument))
        elif kind in _BY_VALUE:
            self.entries += (kind, argument)
        elif isinstance(argument, (list, tuple)):
            self.entries += (kind, len(argument))
            for item in argument:
                self._argument(item)
        elif isinstance(argument, slice):
            self._argument((argument.start, argument.stop, argument.step))
        else:
            self.entries += _constant(argument)

    def _value(self, node: fx.Node) -> int:
        found = self.values.get(node)
        if found is None:
            found = self.values[node] = -1 - len(self.values)
            self.entries += ("from outside", self._described(node))
        return found

    def _described(self, node: fx.Node) -> Any:
        """What must agree of two values that come from outside; a branch or loop is equal to itself alone."""
        if (nested := nested_graph(node)) is not None:
            return id(nested)
        layout = _value_layout(node.meta.get("val"))
        if node.name in self.regions.state:
            return layout, *self._state(node.name)
        return layout, Phase.BACKWARD if node.name in self.regions.tangents else origin_of(node).phase

    def _state(self, name: str) -> Iterator[Any]:
        """How the modules of the region find a piece of state, and what matters about it there."""
        row, paths = self.regions.state[name]
        program = self.regions.program
        yield row.kind
        yield getattr(row.value, "requires_grad", None)
        yield name in program.facts.histories
        yield type(program.state.get(name))
        sites = [call.site.path for call in program.calls.rows[self.number : self.regions.ends[self.number]]]
        for path in paths:
            yield path.relative_to(sites[0]) if path.is_within(sites[0]) else None
            yield path if any(path.is_within(s) and not s.is_within(sites[0]) for s in sites[1:]) else None

    def _call(self, call: Call) -> None:
        """The type and place of a call of the region, and which of the region's values it hands out."""
        around = self.regions.rows[self.number].site.path
        path = call.site.path
        if call.number != self.number:
            self.entries += (call.parent - self.number, path.is_within(around))
            self.entries.append(path.relative_to(around) if path.is_within(around) else path)
        shown = (self.values.get(node, -1) for node in self.regions.shown[call.number])
        self.entries += (call.site.type, "shows", *(value for value in shown if value >= 0))


def _constant(value: object) -> tuple[Any, ...]:
    """A constant and its type, for 1 is not 1.0; numbers that are equal and not the same are told apart."""
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    return kind, repr(value) if kind in (float, complex) else id(value)


def _value_layout(value: object) -> Any:
    """Shape, strides, dtype and device of a value."""
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return (value.dtype, value.layout, _hashable(value.shape), _hashable(strides), value.device)
    if isinstance(value, (list, tuple)):
        return tuple(map(_value_layout, value))
    return _constant(value)


def _hashable(sizes: tuple[int, ...] | None) -> Any:
    """Sizes, which have no hash of their own where they are symbols."""
    try:
        hash(sizes)
    except TypeError:
        return str(sizes)
    return sizes
