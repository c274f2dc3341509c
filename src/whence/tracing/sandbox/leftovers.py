"""What a run left behind: named, with tensors in the place of those of the run, which are shapes alone."""

import gc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import _lru_cache_wrapper
from operator import is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.fakes import FakeTensor
from whence._torch.observe.attribute_reads import own_attributes
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import whole_leaves, with_whole_leaves
from whence._torch.record.recorder import Recorder
from whence._torch.sizes.symbols import is_symbolic
from whence.dependence.observed import Change, Left, Read
from whence.dependence.snapshots import Saved, results_kept
from whence.errors import Fault, Place, SideEffect
from whence.program.queries.marks import is_drawn, leading_to
from whence.tracing.log.events import Marked
from whence.tracing.sandbox.module_snapshot import contains_fakes, fakes_in
from whence.tracing.sandbox.probes import probing

_MANY = 500
"""How many more entries a container gets that every run fills further, as after so many runs."""
Named = tuple[str, str | None]
"""What a thing is called, and the line that changed it, or that reads it."""
_DEEP = 6


@dataclass(frozen=True)
class RunValues:
    """What is known of the tensors of a run; `given` are the nodes of what the call was given."""

    recorder: Recorder
    given: frozenset[fx.Node]
    marks: Mapping[fx.Node, Marked]

    def vary(self, tensor: Tensor) -> bool:
        """Whether a tensor follows from what was given, or from random numbers."""
        node = self.recorder.node_of(tensor)
        return node is not None and _follows_from(node, self.given)

    def are_of_state(self, tensor: Tensor) -> bool:
        """Whether a tensor follows from what the model holds, which training changes."""
        node = self.recorder.node_of(tensor)
        held = () if node is None else node.graph.find_nodes(op="placeholder")
        return node is not None and _follows_from(node, {each for each in held if each not in self.given})

    def differ(self, tensor: Tensor) -> bool:
        """Whether a tensor may be another one in the next run."""
        return self.vary(tensor) or self.are_of_state(tensor)

    def are_drawn(self, tensor: Tensor) -> bool:
        """Whether a tensor follows from random numbers."""
        node = self.recorder.node_of(tensor)
        return node is not None and any(map(is_drawn, leading_to([node])))

    def described(self, tensor: Tensor) -> str:
        """The operation that made it, with its line."""
        node = self.recorder.node_of(tensor)
        if node is None or node not in self.marks:
            return "a tensor"
        return f"{node.name} ({self.marks[node].source})"


class StandIns:
    """Tensors with numbers, whichever, for those of a run that it left behind."""

    def __init__(self, values: RunValues) -> None:
        self._values = values
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._containers: dict[int, tuple[object, object]] = {}
        self.varying = self.of_state = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that were made."""
        return tuple(made for _, made in self._made.values())

    def exchanged(self, value: object) -> object:
        """A value with stand-ins for the tensors of the run, in containers too; the same for the same."""
        if not contains_fakes(value):
            return value
        if id(value) not in self._containers:
            self._containers[id(value)] = value, self._exchanged(value)
        return self._containers[id(value)][1]

    def _exchanged(self, value: Any) -> object:
        if isinstance(value, set):
            return set(map(self._of, value))
        return with_whole_leaves(value, list(map(self._of, whole_leaves(value))))

    def given_in(self, value: object) -> list[str]:
        """The tensors of the run in a value that follow from what the call was given."""
        return [self._values.described(tensor) for tensor in fakes_in(value) if self._values.vary(tensor)]

    def _of(self, leaf: object) -> object:
        if not isinstance(leaf, FakeTensor) or any(map(is_symbolic, (*leaf.shape, *leaf.stride()))):
            return leaf
        if id(leaf) not in self._made:
            self.varying = self.varying or self._values.vary(leaf)
            self.of_state = self.of_state or self._values.are_of_state(leaf)
            made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            self._made[id(leaf)] = leaf, made
        return self._made[id(leaf)][1]


def left_behind(
    changes: Sequence[Change],
    outer: Sequence[Saved],
    named: Callable[[Change | Saved], Named],
    stand_ins: StandIns,
) -> Left:
    """What there is at the end of a run; raises `SideEffect` for generators that have drawn."""
    SideEffect.refuse(_drew(*named(row)) for row in outer if row.kind.draws)
    rows: list[Change | Saved] = [*changes, *outer]
    names = list(dict.fromkeys(map(named, rows)))
    now = [row.now() for row in outer]
    kept = {row.path: [each for value in row.held() for each in stand_ins.given_in(value)] for row in now}
    return Left(
        changes=tuple(replace(row, after=stand_ins.exchanged(row.after)) for row in changes),
        outer=tuple(row.with_values(stand_ins.exchanged) for row in now),
        names=tuple(name for name, _ in names),
        place=Place(line=next((line for _, line in names if line), None)),
        tensors=stand_ins.tensors,
        varies=stand_ins.varying,
        of_state=stand_ins.of_state,
        kept=tuple((path, tuple(made)) for path, made in kept.items() if made),
    )


def with_put(left: Left, put: Sequence[Change], values: RunValues) -> Left:
    """With what the run put somewhere that it did not read before, and the next run may: numbers and texts,
    and tensors that are the same in each run."""
    stand_ins = StandIns(values)
    rows = [row for row in put if _is_fixed(row.after)]
    if left:
        fixed = (row for row in put if (made := [*fakes_in(row.after)]) and not any(map(values.differ, made)))
        rows += [replace(row, after=stand_ins.exchanged(row.after)) for row in fixed]
    return replace(left, put=tuple(rows), tensors=(*left.tensors, *stand_ins.tensors))


def _is_fixed(value: Any) -> bool:
    """Whether a value is a number, a text, a flag, a description of torch's, or made of such for good."""
    if type(value) in (tuple, torch.Size):
        return all(map(_is_fixed, value))
    return type(value) in (*PLAIN, torch.dtype, torch.device)


def refuse_drawn(caches: Iterable[Saved], values: RunValues) -> None:
    """Raise `SideEffect` where a function keeps what it has drawn."""
    SideEffect.refuse(
        Fault(
            f"{row.path} keeps what it draws, {values.described(drawn[0])}",
            why="eager mode draws in the first call of all, and a program would draw in every run",
            remedy="call the model once on the example inputs before the capture",
        )
        for row in caches
        if (drawn := [*filter(values.are_drawn, results_kept(row.thing, FakeTensor))])
    )


def probed(left: Left, told: Callable[[], None]) -> Left:
    """As after many more runs: longer containers, and numbers that call `told` when they decide something.

    Call it when everything is as it was before the run: of things outside, what has changed since is probed.
    """
    held = [(row.after, own_attributes(row.holder).get(row.name, {})) for row in left.changes]
    made = {id(after): _probed(after, before, told) for after, before in held}
    changes = tuple(replace(row, after=made[id(row.after)]) for row in left.changes)
    outer = tuple(row._replace(before=_probed(row.before, row.now().before, told)) for row in left.outer)
    return replace(left, changes=changes, outer=outer)


def _probed(state: Any, before: Any, told: Callable[[], None]) -> Any:
    if type(state) in (dict, OrderedDict, defaultdict, Counter) and isinstance(before, dict):
        made = copy(state)
        for key in [key for key, value in state.items() if before.get(key) is not value]:
            made[key] = _probed(state[key], {}, told)
        return made
    if type(state) is list:
        held = before if type(before) is list else []
        same = [is_(value, there) for value, there in zip(state, held, strict=False)]
        same += [False] * (len(state) - len(same))
        more = _MANY if len(state) > len(held) else 0
        state, same = state + state[-1:] * more, same + [True] * more
        return [
            value if is_same else probing(value, told) for value, is_same in zip(state, same, strict=True)
        ]
    if type(state) is deque:
        return deque([*state, *list(state)[-1:] * _MANY], state.maxlen)
    if type(state) is set:
        return {*state, *map(str, range(_MANY))}
    return probing(state, told)


def _drew(name: str, line: str | None) -> Fault:
    return Fault(
        f"the model draws from the generator `{name}` while it runs",
        where=Place(line=line),
        why="the number would be a constant of the program, the same in every run",
        remedy="draw it outside and pass it in, or use torch's generator",
    )


def _follows_from(node: fx.Node, given: Container[fx.Node]) -> bool:
    """Whether a value follows from one of the nodes `given`, or from random numbers."""
    return any(found in given or is_drawn(found) for found in leading_to([node]))


def take_out(tensors: Sequence[Tensor]) -> list[str]:
    """Take tensors out of everything that holds them; the kinds of things from which they cannot be taken.

    What code of the user can reach has been given back. This is for what is left: things that nobody knew of,
    found by asking Python's collector who holds a tensor.
    """
    ours = {id(tensors)}
    if not _holders(tensors, ours):  # one look at all that there is, in the place of one for each
        return []
    lost: list[str] = []
    for tensor in tensors:
        lost += _taken_out(tensor, ours, _DEEP)
    return list(dict.fromkeys(lost))


def _taken_out(held: Any, ours: set[int], depth: int) -> list[str]:
    """From every holder of a thing; where that is a tuple, the tuple from its holders.

    No generator: the collector would find that one among who holds the thing.
    """
    lost: list[str] = []
    holders = _holders([held], ours | {id(held)})
    ours = ours | {id(holders)}
    for holder in holders:
        if isinstance(holder, Read):  # what is noted of a run is needed after it
            lost.append("note of what was read")
        elif isinstance(holder, _lru_cache_wrapper):
            holder.cache_clear()
        elif caches := list(_caches_with(holder, ours)):
            for cache in caches:
                cache.cache_clear()
        elif isinstance(holder, tuple) and depth:
            lost += _taken_out(holder, ours, depth - 1)
        elif not _removed(held, holder):
            lost.append(type(holder).__name__)
    return lost


def _caches_with(container: Any, ours: set[int], depth: int = 3) -> Iterator[Any]:
    """The caches of calls that have a container among their results, which are wrong without its content."""
    if not depth or not isinstance(container, dict | list | tuple):
        return
    holders = _holders([container], ours)
    ours = ours | {id(holders), id(container)}
    yield from (each for each in holders if isinstance(each, _lru_cache_wrapper))
    for each in holders:
        yield from _caches_with(each, ours, depth - 1)


def _holders(held: Sequence[Any], ours: set[int]) -> list[Any]:
    """Who holds one of these, but for code that runs."""
    asked = tuple(held)  # Python 3.13 finds the tuple of what it is called with, too
    found = gc.get_referrers(*asked)
    ours = ours | {id(held), id(asked)}
    return [each for each in found if id(each) not in ours and not isinstance(each, FrameType)]


def _removed(held: Any, holder: Any) -> bool:
    if isinstance(holder, dict):
        for key in [key for key, value in dict.items(holder) if value is held]:
            dict.__delitem__(holder, key)
    elif isinstance(holder, list | deque):
        kept = [value for value in holder if value is not held]
        holder.clear()
        holder.extend(kept)
    elif isinstance(holder, set):
        holder.discard(held)
    else:
        names = [name for name, value in own_attributes(holder).items() if value is held]
        for name in names:
            object.__delattr__(holder, name)
        return bool(names)
    return True
