"""Origins across a pass: what is still there keeps its own, new nodes get one by a rule, or are named.

The rules, in order: what was said (`edit.replaced`, `edit.split`); copied metadata; a new node that is read
in the place of nodes that are gone comes from those, and from what only they had use for (n to 1); a new node
that only such nodes read comes from what they come from (1 to n). Of a graph that was traced anew without its
metadata nothing is deduced.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from whence._torch.graphs import nested_graph
from whence.program.equality import NOT_PLACED
from whence.program.node_records import has_origin, record_of, set_origin
from whence.provenance import CallSite, Origin
from whence.provenance.origin import merged
from whence.provenance.places import common_ancestor
from whence.rewriting.edits.after import After
from whence.rewriting.edits.before import WorkingCopy
from whence.schema import Phase, Quality

Said = Mapping[fx.Node, tuple[str, ...]]
"""What the pass said itself: the names of the nodes that a node was made from."""


@dataclass
class NodeSources:
    """The names of before that each new or changed node comes from; `lost` are those with none."""

    of: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    lost: list[fx.Node] = field(default_factory=list)


def sources_of(old: WorkingCopy, now: After, said: Said) -> NodeSources:
    """Find out what each node comes from that was not there before."""
    there = {node for node in now.kept.values() if node not in now.changed}
    new = [node for node in now.graph.nodes if node not in there and node.op not in NOT_PLACED]
    ranks = {name: rank for rank, name in enumerate(old.nodes)}
    heirs = _heirs(now)
    found = NodeSources()
    for node in reversed(new):
        names: Sequence[str] = said.get(node, ())
        if not names and not now.is_bare:
            names = _known(old, now, heirs, node) or _of_readers(found, node)
        if names:
            found.of[node] = tuple(sorted(dict.fromkeys(names), key=ranks.__getitem__))
        else:
            found.lost.append(node)
    found.lost.reverse()
    return found


def _heirs(now: After) -> dict[fx.Node, list[str]]:
    found: dict[fx.Node, list[str]] = {}
    for name, nodes in now.stands.items():
        for node in nodes:
            found.setdefault(node, []).append(name)
    return found


def _known(old: WorkingCopy, now: After, heirs: Mapping[fx.Node, Sequence[str]], node: fx.Node) -> list[str]:
    names = [now.copied[node]] if node in now.copied else []
    names += [now.changed[node]] if node in now.changed else []
    replaced = [name for name in heirs.get(node, ()) if old.nodes[name].op not in NOT_PLACED]
    return [*names, *replaced, *_only_for(old, now, replaced)]


def _only_for(old: WorkingCopy, now: After, names: Sequence[str]) -> Iterator[str]:
    """Nodes that are gone, stand for nothing, and had use for these alone."""
    gone = set(names)
    waiting = [source for name in names for source in old.nodes[name].all_input_nodes]
    while waiting:
        node = waiting.pop()
        is_gone = node.name not in now.kept and node.name not in now.stands and node.op not in NOT_PLACED
        if node.name not in gone and is_gone and all(user.name in gone for user in node.users):
            gone.add(node.name)
            yield node.name
            waiting += node.all_input_nodes


def _of_readers(found: NodeSources, node: fx.Node) -> list[str]:
    """The sources of those who read a new node, where all of them are new, too."""
    readers = list(node.users)
    if not readers or not all(reader in found.of for reader in readers):
        return []
    return [name for reader in readers for name in found.of[reader]]


def write_origins(old: WorkingCopy, now: After, sources: NodeSources, name: str) -> None:
    """Write an origin on every node; those that are lost get none."""
    heir = {source: node for node, names in sources.of.items() for source in names}
    rows = old.program.calls

    def around(places: Sequence[CallSite | None]) -> CallSite | None:
        number = common_ancestor(rows.parents, [rows.number(place) for place in places])
        return rows.rows[number].site if number else None

    def present(origin: Origin) -> Origin:
        forward = origin.forward
        held = None if forward is None else now.image(forward) or heir.get(forward)
        return origin._replace(forward=None if held is None else held.name)

    also = dict(_merged_away(old, now))
    for before, node in now.kept.items():
        if node not in now.changed and has_origin(old.nodes[before]):
            set_origin(node, present(_with_calls_of(old, before, also.get(node, ()))))
    for node, names in sources.of.items():
        set_origin(node, present(merged([old.origin(each) for each in names], around, name)))
    for node in sources.lost:
        set_origin(node, None)
    for node in now.graph.nodes:
        if node.op == "get_attr":
            _write_nested(node)


def _merged_away(old: WorkingCopy, now: After) -> Iterator[tuple[fx.Node, list[str]]]:
    """Nodes that are still there, with those that are gone because they computed the same."""
    kept = {node: name for name, node in now.kept.items()}
    for node, names in _heirs(now).items():
        same = [name for name in names if old.nodes[name].target == node.target]
        if node in kept and node not in now.changed and node.op not in NOT_PLACED and same:
            yield node, same


def _with_calls_of(old: WorkingCopy, name: str, others: Sequence[str]) -> Origin:
    """The origin of a node; other calls that it now computes for, too, are named behind its own.

    What was computed in the forward and again in the backward, by a checkpoint or by itself, is computed in
    the forward now, whichever of the two is left.
    """
    found = [old.origin(each) for each in (name, *others)]
    origin = min(found, key=lambda each: (each.phase is not Phase.FORWARD, each.recomputed))
    calls = tuple(dict.fromkeys(call for each in (origin, *found) for call in each.calls))
    if calls == origin.calls and origin is found[0]:
        return origin
    unknown = any(each.quality is Quality.NONE for each in found)
    return origin._replace(calls=calls, quality=Quality.NONE if unknown else Quality.INFERRED)


def _write_nested(reader: fx.Node) -> None:
    """What a pass put into a branch or a loop belongs to the call that runs it."""
    inner, user = nested_graph(reader), next(iter(reader.users), None)
    known = None if user is None else record_of(user).origin
    if inner is None or known is None:
        return
    for node in inner.graph.nodes:
        if node.op == "call_function" and not has_origin(node):
            set_origin(node, known._replace(quality=Quality.INFERRED))
        if node.op == "get_attr":
            _write_nested(node)
