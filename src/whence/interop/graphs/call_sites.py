"""The tree of module calls, from the stacks of all nodes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from whence.interop.graphs.frames import Frame
from whence.program import Call, Calls
from whence.provenance import ROOT, CallSite, ModulePath
from whence.provenance.places import common_ancestor

ROOT_MODULE = 1
"""The number of the call of the exported module itself; 0 is the program."""


@dataclass(eq=False)
class _Made:
    """A call while the tree is being made."""

    frame: Frame | None
    inside: dict[tuple[ModulePath, int], "_Made"] = field(default_factory=dict)

    def walk(self, parent: int, counted: Iterator[int]) -> Iterator[tuple["_Made", int, int]]:
        """The call and those inside it, each with its number and its caller's."""
        number = next(counted)
        yield self, number, parent
        for child in self.inside.values():
            yield from child.walk(number, counted)


@dataclass(frozen=True)
class Sites:
    """The calls of an exported program, and the number of the call that made each node.

    `inferred` are the nodes that nobody said anything about: they were given to the innermost call around all
    who use them.
    """

    calls: Calls
    homes: Mapping[fx.Node, int]
    inferred: frozenset[fx.Node]


def sites_of(
    nodes: Sequence[fx.Node],
    frames: Mapping[fx.Node, tuple[Frame, ...] | None],
    kind: str,
    empty: Iterable[tuple[ModulePath, int]] = (),
) -> Sites:
    """The calls that the frames tell of, and those in `empty`, which made no node.

    A module that several others call has calls of its own in each. Two calls that the exporter gave one
    number are told apart by their callers.
    """
    root = _Made(None)
    made = {node: _enter(root, frames[node] or ()) for node in nodes}
    for path, index in empty:
        _add_empty(root, path, index)
    calls, numbers = _calls_numbered(root, kind)
    homes = {node: numbers[call] for node, call in made.items()}
    unknown = [node for node in nodes if frames[node] is None]
    _infer(homes, unknown, calls.parents)
    return Sites(calls, homes, frozenset(unknown))


def _enter(root: _Made, frames: Iterable[Frame]) -> _Made:
    call = root
    for frame in frames:
        key = (frame.path, frame.index)
        call = call.inside.setdefault(key, _Made(frame))
    return call


def _add_empty(root: _Made, path: ModulePath, index: int) -> None:
    every = [call for call, _, _ in root.walk(0, iter(range(10**9)))]
    if any(call.frame is not None and (call.frame.path, call.frame.index) == (path, index) for call in every):
        return
    around = [call for call in every if call.frame is None or path.is_within(call.frame.path)]
    caller = max(reversed(around), key=lambda call: 0 if call.frame is None else len(call.frame.path))
    caller.inside[path, index] = _Made(Frame(path, index, "", ""))


def _calls_numbered(root: _Made, kind: str) -> tuple[Calls, dict[_Made, int]]:
    rows = [Call(0, CallSite(ROOT, 0, kind), 0)]
    numbers: dict[_Made, int] = {}
    walked = list(root.walk(0, iter(range(ROOT_MODULE, 10**9))))
    taken: dict[ModulePath, set[int]] = {}
    for call, number, parent in walked:
        numbers[call] = number
        rows.append(Call(number, _exported_site(call, kind, taken), parent))
    return Calls(tuple(rows)), numbers


def _exported_site(call: _Made, kind: str, taken: dict[ModulePath, set[int]]) -> CallSite:
    """The site as the exporter numbered it, or with the next number where that one is taken."""
    if call.frame is None:
        taken.setdefault(ROOT, set()).add(0)
        return CallSite(ROOT, 0, kind)
    used = taken.setdefault(call.frame.path, set())
    index = call.frame.index if call.frame.index not in used else max(used) + 1
    used.add(index)
    return CallSite(call.frame.path, index, call.frame.type)


def _infer(homes: dict[fx.Node, int], unknown: Sequence[fx.Node], parents: Sequence[int]) -> None:
    for node in reversed(unknown):
        users = [homes[user] for user in node.users if user in homes]
        homes[node] = max(ROOT_MODULE, common_ancestor(parents, users)) if users else ROOT_MODULE
