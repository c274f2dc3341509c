"""What a pass did: which nodes are still there, which stand for others, and which are new.

A node is still there when it is the same object, or in a new graph the copy of its name and operation. A node
stands for one that is gone where it is read instead of it: told by `replace_all_uses_with`, or seen at the
same argument of a node that is still there. A node that is gone and computed what another still computes is
that one. In a graph that was traced anew without metadata a node is still there that computes the same of the
same, and nothing else is known.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from whence._torch.operators.schemas import keeps_its_place
from whence.rewriting.edits.before import WorkingCopy, mark_of
from whence.rewriting.splice import computed_of

aten = torch.ops.aten
Told = list[tuple[fx.Node, str]]
"""Nodes whose uses went over to others, in order, with the names of those."""


@dataclass
class After:
    """The graph after a pass.

    `kept` gives for names of before the nodes that are still there. `stands` gives for names of nodes that
    are gone the nodes that are read in their place. `copied` gives for other nodes the name of the one whose
    metadata they carry. `changed` are nodes that were given another operation. `is_bare` says that the graph
    is another one, and no operation in it says what it was made from.
    """

    graph: fx.Graph
    kept: dict[str, fx.Node] = field(default_factory=dict)
    stands: dict[str, dict[fx.Node, None]] = field(default_factory=dict)
    copied: dict[fx.Node, str] = field(default_factory=dict)
    changed: dict[fx.Node, str] = field(default_factory=dict)
    is_bare: bool = False

    def image(self, name: str) -> fx.Node | None:
        """The node that holds the value now; None where there is none, or where it is not clear which."""
        if name in self.kept:
            return self.kept[name]
        found = list(self.stands.get(name, ()))
        return found[0] if len(found) == 1 else None

    def edited(self, old: WorkingCopy) -> Iterator[fx.Node]:
        """The operations that stand as they were, with other arguments.

        What reads another node in the place of one that is gone is not edited.
        """
        names = {node: name for name, node in self.kept.items()}
        for name, node in self.kept.items():
            if node.op != "call_function" or node in self.changed:
                continue
            pairs = _argument_pairs(old.nodes[name], node)
            if pairs is None or not all(self._reads_as(*pair, names) for pair in pairs):
                yield node

    def _reads_as(self, was: Any, now: Any, names: Mapping[fx.Node, str]) -> bool:
        """Whether an argument is the one of before, or what took its place."""
        if isinstance(was, fx.Node) and isinstance(now, fx.Node):
            return was.name not in self.kept or names.get(now) == was.name
        return was is now or repr(was) == repr(now)


def after(old: WorkingCopy, graph: fx.Graph, told: Told) -> After:
    found = After(graph)
    _recognise(found, old, graph is old.working.graph)
    _hear(found, old, told)
    _look(found, old)
    _value_numbers(found, old)
    _believe_copies(found, old)
    return found


def _recognise(found: After, old: WorkingCopy, is_working_copy: bool) -> None:
    marked: dict[str, list[fx.Node]] = {}
    for node in found.graph.nodes:
        name = old.names.get(node) if is_working_copy else None
        if name is not None:
            found.kept[name] = node
            if _changed(old.nodes[name], node):
                found.changed[node] = name
        elif (mark := mark_of(node)) is not None and mark in old.nodes:
            marked.setdefault(mark, []).append(_stopping(old.nodes[mark], node))
    for mark, nodes in marked.items():
        same = [node for node in nodes if not _changed(old.nodes[mark], node)]
        if mark not in found.kept and same and not is_working_copy:
            found.kept[mark] = next((node for node in same if node.name == mark), same[0])
        found.copied |= {node: mark for node in nodes if node is not found.kept.get(mark)}
    if not is_working_copy:
        found.kept |= {name: node for name, node in _borders(found, old) if name not in found.kept}
        found.is_bare = not any(old.nodes[mark].op == "call_function" for mark in marked)
    found.kept |= {name: node for name, node in _attributes(found, old) if name not in found.kept}
    if found.is_bare:
        _recompute(found, old)


def _stopping(before: fx.Node, node: fx.Node) -> fx.Node:
    """The node, where gradients stop as before: a tracer writes `alias` where it differentiates nothing."""
    if before.target is aten.detach.default and node.target is aten.alias.default:
        node.target = before.target
    return node


def _recompute(found: After, old: WorkingCopy) -> None:
    """Operations that compute the same of the same, in the same order among equals."""
    equal: dict[Hashable, list[fx.Node]] = {}
    for node in found.graph.nodes:
        if node.op == "call_function":
            equal.setdefault(_computed(node, lambda source: source), []).append(node)
    for node in old.program.graph.nodes:
        if node.op == "call_function" and (same := equal.get(_computed(node, partial(_image, found)))):
            found.kept[node.name] = _stopping(node, same.pop(0))


def _borders(found: After, old: WorkingCopy) -> Iterator[tuple[str, fx.Node]]:
    """Inputs and the output of a graph that was traced anew, which carry nothing: inputs by their names, or
    by their positions where a tracer gave all of them others.
    """
    inputs = [node for node in old.nodes.values() if node.op == "placeholder"]
    now = found.graph.find_nodes(op="placeholder")
    names = {node.name for node in inputs}
    named = {node: name for node in now for name in (str(node.target), node.name) if name in names}
    if not named and len(now) == len(inputs):
        pairs = zip(now, inputs, strict=True)
        yield from ((before.name, node) for node, before in pairs if _layout(node) == _layout(before))
    yield from ((name, node) for node, name in named.items())
    yield from ((node.name, found.graph.output_node()) for node in old.nodes.values() if node.op == "output")


def _attributes(found: After, old: WorkingCopy) -> Iterator[tuple[str, fx.Node]]:
    """What reads state of the program at its place in the module is what read it before."""
    names = {row.path: row.name for row in old.program.signature.attributes}
    for node in found.graph.find_nodes(op="get_attr") if names else ():
        if (name := names.get(str(node.target))) is not None:
            yield name, node


def _changed(before: fx.Node, now: fx.Node) -> bool:
    if before.op in ("placeholder", "output"):
        return before.op != now.op
    return (before.op, before.target) != (now.op, now.target)


def _hear(found: After, old: WorkingCopy, told: Told) -> None:
    """Replacements that were told; nodes that came and went in between are followed to one that is there."""
    names = {node.name: node for node in found.graph.nodes}
    later: dict[str, list[str]] = {}
    for node, name in told:
        later.setdefault(old.names.get(node, node.name), []).append(name)
    for name in old.nodes:
        if name in found.kept or name not in later:
            continue
        for end in dict.fromkeys(_ends(name, later, names)):
            found.stands.setdefault(name, {})[names[end]] = None


def _ends(name: str, later: Mapping[str, list[str]], present: Mapping[str, fx.Node]) -> Iterator[str]:
    waiting, seen = list(later.get(name, ())), {name}
    while waiting:
        current = waiting.pop(0)
        if current in present:
            yield current
        elif current not in seen:
            seen.add(current)
            waiting += later.get(current, ())


def _look(found: After, old: WorkingCopy) -> None:
    """Replacements that are seen: another node at the same argument of a node that is still there."""
    for name, node in found.kept.items():
        for source, reads in _argument_pairs(old.nodes[name], node) or ():
            if isinstance(source, fx.Node) and isinstance(reads, fx.Node) and source.name not in found.kept:
                found.stands.setdefault(source.name, {})[reads] = None


def _argument_pairs(before: fx.Node, now: fx.Node) -> list[tuple[Any, Any]] | None:
    """What a node read with what stands there now; None where it reads more, or less."""
    earlier, later = (list(_flat_argument((each.args, each.kwargs))) for each in (before, now))
    return list(zip(earlier, later, strict=True)) if len(earlier) == len(later) else None


def _flat_argument(argument: Any) -> Iterator[Any]:
    if isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _flat_argument(item)
    elif isinstance(argument, Mapping):
        for item in argument.values():
            yield from _flat_argument(item)
    elif isinstance(argument, slice):
        yield from _flat_argument((argument.start, argument.stop, argument.step))
    else:
        yield argument


def _value_numbers(found: After, old: WorkingCopy) -> None:
    """What is gone, stands for nothing that was seen, and computed what a node that is there computes."""
    known: dict[Hashable, fx.Node] = {}
    for name, node in old.nodes.items():
        if node.op != "call_function" or keeps_its_place(node.target, node.args, node.kwargs):
            continue
        key = _computed(node, partial(_image, found))
        image = found.image(name)
        if image is None and key in known:
            found.stands[name] = {known[key]: None}
        elif image is not None:
            known.setdefault(key, image)


def _computed(node: fx.Node, value: Callable[[fx.Node], fx.Node]) -> Hashable:
    """What a node computes, of what; a view of the same is `alias` where nothing is differentiated."""
    target = aten.alias.default if node.target is aten.detach.default else node.target
    return target, computed_of(node, value)


def _image(found: After, node: fx.Node) -> fx.Node:
    return found.image(node.name) or node


def _believe_copies(found: After, old: WorkingCopy) -> None:
    """A node that is gone is the last of those that carry its metadata, if shape and dtype agree."""
    carrying: dict[str, list[fx.Node]] = {}
    for node, name in found.copied.items():
        if name not in found.kept and name not in found.stands:
            carrying.setdefault(name, []).append(node)
    for name, nodes in carrying.items():
        last = [node for node in nodes if not any(user in nodes for user in node.users)]
        if len(last) == 1 and _layout(last[0]) == _layout(old.nodes[name]):
            found.stands[name] = {last[0]: None}


def _layout(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (getattr(value, "shape", None), getattr(value, "dtype", None))
