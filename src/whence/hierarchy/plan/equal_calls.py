"""The plans of calls that equal an earlier one: made from its plan by renaming, when somebody asks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from whence.hierarchy.plan.facts import NodeLayout
from whence.hierarchy.plan.plan import Body, CallPlan, Numbering, pack_of, packed_call


@dataclass(frozen=True)
class SharedNodes:
    """The nodes of a call that others equal, in order."""

    number: int
    nodes: Sequence[fx.Node]

    @cached_property
    def positions(self) -> dict[str, int]:
        return {node.name: position for position, node in enumerate(self.nodes)}

    @cached_property
    def readers(self) -> dict[str, tuple[int, int]]:
        """For each value that is read, the position of a node that reads it, and as which of its inputs."""
        return {
            source.name: (position, which)
            for position, node in enumerate(self.nodes)
            for which, source in enumerate(node.all_input_nodes)
        }


@dataclass(frozen=True)
class Renaming:
    """Says what is in `copy`, whose nodes are `nodes`, what something is in the example it equals."""

    numbering: Numbering
    example: SharedNodes
    copy: int
    nodes: Sequence[fx.Node]

    def name(self, value: str) -> str:
        """A value: of the call itself, from outside, or what a call inside it keeps."""
        if (call := packed_call(value)) is not None:
            return pack_of(self.call(call))
        if value in self.example.positions:
            return self.nodes[self.example.positions[value]].name
        position, which = self.example.readers[value]
        return self.nodes[position].all_input_nodes[which].name

    def call(self, number: int) -> int:
        return self.numbering.moved(number, self.example.number, self.copy)

    def body(self, body: Body) -> Body:
        """What a call computes in one phase."""
        return Body(
            inputs=tuple(map(self.name, body.inputs)),
            outputs=tuple(map(self.name, body.outputs)),
            reads=tuple((self.name(name), path) for name, path in body.reads),
            steps=tuple(self.name(s) if isinstance(s, str) else self.call(s) for s in body.steps),
            kept=tuple(map(self.name, body.kept)),
        )


@dataclass
class CallPlans(Mapping[int, CallPlan]):
    """The plans of all calls by number: those that were made, and those of equal calls by renaming."""

    layout: NodeLayout
    made: dict[int, CallPlan]
    _examples: dict[int, SharedNodes] = field(default_factory=dict)
    _renamings: dict[int, Renaming] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __getitem__(self, number: int) -> CallPlan:
        if number not in self.made:
            self.made[number] = self._renamed(number)
        return self.made[number]

    @cached_property
    def _numbers(self) -> list[int]:
        copies = self.layout.copies
        return [n for n in range(len(copies)) if n in self.made or copies[n] is not None]

    def _renamed(self, number: int) -> CallPlan:
        copy = self.layout.copies[number]
        if copy is None:
            raise KeyError(number)
        if copy not in self._renamings:
            example, nodes = self._example(self.layout.first[copy]), self.layout.nodes_in(copy)
            self._renamings[copy] = Renaming(self.layout.numbering, example, copy, nodes)
        renaming = self._renamings[copy]
        like = self[self.layout.numbering.moved(number, copy, renaming.example.number)]
        backward = None if like.backward is None else renaming.body(like.backward)
        return CallPlan(number, renaming.body(like.forward), backward)

    def _example(self, number: int) -> SharedNodes:
        if number not in self._examples:
            self._examples[number] = SharedNodes(number, self.layout.nodes_in(number))
        return self._examples[number]
