"""What it would save to compute a call once more in the backward, and what that would take.

That is what `torch.utils.checkpoint.checkpoint(call, ..., use_reentrant=False)` does. What only derivatives
inside the call read of what it made is not kept then. Its arguments are, and what it reads besides; inputs of
the program are there anyway. It runs once more up to the last value that a derivative inside it reads, not to
its end: there a checkpoint stops. A checkpoint in it keeps its arguments there instead, and runs by itself.
Of a call that is in one there is nothing to save, and that one runs through it besides, where it goes on
behind it. A checkpoint that computes nothing again is not seen.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from whence.program import Calls
from whence.program.node_records import origin_of
from whence.provenance.places import ancestors, common_ancestor
from whence.reports.cost import Cost
from whence.reports.memory.storages import Storages, is_made, row_of
from whence.schema import Phase


def recomputing_of(storages: Storages, cost: Cost) -> dict[int, dict[str, int]]:
    """For each call by number, where there is a backward: `saves`, the bytes that are kept less if it alone
    were computed again, or more if below zero, and the `FLOPs` that run once more."""
    if not storages.has_backward:
        return {}
    checkpoints = _Checkpoints(storages)
    saved, flops = checkpoints.saved(), checkpoints.flops(cost)
    return {
        number: {"saves": saved[number], "FLOPs": flops[number]}
        for number, _ in enumerate(storages.program.calls.rows)
    }


@dataclass(frozen=True)
class _Checkpoints:
    storages: Storages

    @cached_property
    def _calls(self) -> Calls:
        return self.storages.program.calls

    @cached_property
    def _named(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.storages.nodes}

    def saved(self) -> Counter[int]:
        """The bytes that are kept less, by the number of the call: none in a checkpoint."""
        found, size = Counter[int](), self.storages.size
        for base, readings in self.storages.readings.items():
            scopes = [self._scope(base), *(self._scope(each.node) for each in readings)]
            for number in self._around(common_ancestor(self._calls.parents, scopes)):
                found[number] += size[base] if number in self._ends else 0
        for number, bases in self._wanted.items():
            found[number] -= sum(size[base] for base in bases)
        return Counter({number: found[number] for number in found if number not in self._inside})

    def flops(self, cost: Cost) -> Counter[int]:
        """The FLOPs that run once more, by the number of the call."""
        found = Counter[int]()
        for (at, node), figures in zip(self._operations(), cost.nodes, strict=True):
            numbers = self._inside_again.get(node) or self._repeating(node, at)
            for number in numbers if figures.taken else ():
                found[number] += figures.flops
        return found

    @cached_property
    def _inside(self) -> frozenset[int]:
        """The calls that are in a checkpoint with others."""
        found = set[int]()
        for run in self.storages.runs:
            count = Counter(number for node in run for number in self._around(self._scope(node)))
            found.update(number for number in count if count[number] < len(run))
        return frozenset(found)

    @cached_property
    def _inside_again(self) -> dict[fx.Node, list[int]]:
        """What checkpoints compute again, with the calls in them that would compute it once more.

        The checkpoint around such a call runs through it only where something is saved behind it, too.
        """
        found: dict[fx.Node, list[int]] = {}
        for run in self.storages.runs:
            known = frozenset(run)
            rows = [frozenset(self._around(self._scope(node))) & self._inside for node in run]
            saved = [at for at, node in enumerate(run) if not known.issuperset(node.users)]
            last = {number: at for at in saved for number in rows[at]}
            for at, (node, numbers) in enumerate(zip(run, rows, strict=True)):
                found[node] = [each for each in numbers if at < last.get(each, 0) < saved[-1]]
        return found

    def _operations(self) -> Iterator[tuple[int, fx.Node]]:
        """All operations, with their places; those of a graph inside are at that of the node that runs it."""
        at, place = 0, self.storages.place
        for node in self.storages.program.nodes():
            users = [place[user] for user in node.users if user in place]
            at = place[node] if node in place and node.op != "get_attr" else at
            at = min(users, default=at) if node in place and node.op == "get_attr" else at
            if node.op == "call_function":
                yield at, node

    @cached_property
    def _ends(self) -> dict[int, int]:
        """The place before which a call is over that is computed again: what is saved last is there."""
        found: dict[int, int] = {}
        for node in self.storages.nodes:
            if saved := self._saved_for(node):
                again = origin_of(node).recomputed
                forward = None if again else self._named.get(origin_of(node).forward or "")
                for number in self._around(self._scope(forward or node)):
                    found[number] = max(found.get(number, 0), self._end(forward, saved))
        return found

    def _end(self, forward: fx.Node | None, saved: Sequence[fx.Node]) -> int:
        """Where all is there that an operation saves, which is not run for the sake of its arguments."""
        place, bases = self.storages.place, self.storages.bases
        if forward is None:  # which nobody noted, or a checkpoint, which saves what it is given
            return 1 + max(place[source] for source in saved)
        return place[forward] + any(row_of(base) is forward for source in saved for base in bases[source])

    @cached_property
    def _wanted(self) -> dict[int, set[fx.Node]]:
        """What is kept then, and would not be otherwise."""
        found: dict[int, set[fx.Node]] = {number: set() for number in self._ends}
        for number in self._ends:
            inputs = self._calls.rows[number].inputs
            given = [self._named[name] for name in inputs.names if name in self._named] if inputs else ()
            found[number].update(base for node in given for base in self._made(node))
        for at, node in enumerate(self.storages.nodes):
            bases = {base for source in node.all_input_nodes for base in self._made(source)}
            for number in self._repeating(node, at):
                inside = self._calls.within(number)
                found[number].update(base for base in bases if self._scope(base) not in inside)
        return found

    def _made(self, node: fx.Node) -> Iterator[fx.Node]:
        """The storages in which a value lies that the forward made, and that are not kept."""
        for base in self.storages.bases[node]:
            if is_made(base) and base not in self.storages.readings:
                yield base

    def _repeating(self, node: fx.Node, at: int) -> Iterator[int]:
        """The calls that run an operation of the forward once more when they are computed again."""
        is_forward = node.op == "call_function" and origin_of(node).phase is Phase.FORWARD
        for number in self._around(self._scope(node)) if is_forward else ():
            if at < self._ends.get(number, 0) and number not in self._inside:
                yield number

    def _scope(self, node: fx.Node) -> int:
        return self._calls.number(origin_of(node).place)

    def _around(self, scope: int) -> Sequence[int]:
        return ancestors(self._calls.parents, scope)

    def _saved_for(self, node: fx.Node) -> list[fx.Node]:
        """What a derivative, or a checkpoint, reads that it has from the forward, or of the inputs."""
        if node.op != "call_function" or origin_of(node).phase is not Phase.BACKWARD:
            return []
        return [
            source
            for source in node.all_input_nodes
            if source.op != "call_function" or origin_of(source).phase is Phase.FORWARD
            if self.storages.redrawn.keys().isdisjoint(self.storages.bases[source])
        ]
