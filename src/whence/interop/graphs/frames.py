"""Which module call made a node of an exported graph: its stack of modules, in our spelling.

torch.export writes paths in several dialects. A slice of a container is spelled into the path
(`layers.slice(2, None, None).0`), roots have names of their own (`L['self']`, `_export_root`), and the number
of a call stands behind an `@` in the key of an entry.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from whence._torch.files import TORCH
from whence.provenance import ROOT, ModulePath, Source

STACK = "nn_module_stack"
_ROOTS = frozenset({"L['self']", "L__self__", "_export_root", "self", "L['fn']", "L__fn__"})
_SLICE = re.compile(r"slice\((-?\d+|None), (-?\d+|None), (-?\d+|None)\)")
_PATCHED = re.compile(r"(^|\.)forward\.__self__(?=\.|$)")
"""How the strict front end goes on from a module whose `forward` was set on the instance."""
_OUTSIDE = re.compile(r"G\[|.*\.__closure__\[")
"""How it calls a module that a global variable or a closure holds: a part of its caller."""
_INDEX = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")
_ENTRY = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True)
class Frame:
    """One entry of a stack: which call of which module this is, and its class.

    `identity` is what the exporter called the module; in strict mode it is one for all names of a module.
    """

    path: ModulePath
    index: int
    type: str
    identity: str


def frames_of(node: fx.Node, spelling: "Spelling") -> tuple[Frame, ...] | None:
    """The calls around a node, outermost first, without the root; None where nobody said."""
    stack = node.meta.get(STACK)
    return frames_in(stack, spelling) if isinstance(stack, Mapping) and stack else None


def frames_in(stack: Mapping[str, Any], spelling: "Spelling") -> tuple[Frame, ...]:
    """The calls of a stack, outermost first, without the root."""
    return tuple(_frames(stack, spelling))


def _frames(stack: Mapping[str, Any], spelling: "Spelling") -> Iterator[Frame]:
    for key, entry in stack.items():
        raw, kind = entry[0], entry[1]
        path = spelling.path(str(raw))
        identity, _, number = str(key).partition("@")
        if path != ROOT and (path in spelling.known or not _OUTSIDE.match(str(raw))):
            yield Frame(path, int(number) if number.isdigit() else 0, class_name(kind), identity)


def root_type(nodes: Iterable[fx.Node]) -> str | None:
    """The class of the root, as the first stack that has one says."""
    for node in nodes:
        for raw, kind, *_ in node.meta.get(STACK, {}).values():
            if segments(str(raw)) == ROOT:
                return class_name(kind)
    return None


def class_name(kind: object) -> str:
    """`Linear` for the class or its full name."""
    name = kind.__qualname__ if isinstance(kind, type) else str(kind)
    return name.rpartition(".")[2].strip("'>")


def segments(raw: str) -> ModulePath:
    """The segments of a path as it is written, slices among them as one segment each; without the root's
    name."""
    kept: list[str] = []
    for part in _path_segments(raw):
        if kept or part not in _ROOTS:
            kept.append(part)
    return ModulePath(kept)


def _path_segments(raw: str) -> Iterator[str]:
    """Split at dots that are not inside brackets; `a['b']` and `a[0]` are two segments."""
    held: dict[str, str] = {}

    def hide(found: re.Match[str]) -> str:
        name = f"\0{len(held)}\0"
        held[name] = found.group(0)
        return name

    root = next((name for name in _ROOTS if raw.startswith(name) and "[" in name), None)
    rest = raw if root is None else raw.removeprefix(root).removeprefix(".")
    rest = _PATCHED.sub("", rest)
    hidden = _SLICE.sub(hide, rest)
    yield from (held.get(part, part) for part in _INDEX.sub(r".\1", hidden).split(".") if part)


@dataclass(frozen=True)
class Spelling:
    """How the paths of one exported program are read.

    `known` are the modules it lists. `kept` are containers with a slice in which members keep their names, as
    a sliced `Sequential` does; members of a sliced `ModuleList` are counted from zero.
    """

    known: frozenset[ModulePath]
    members: Mapping[ModulePath, list[str]]
    kept: frozenset[ModulePath] = frozenset()

    def path(self, raw: str) -> ModulePath:
        """The path of the module itself, whichever way its container was sliced."""
        found = self._unsliced(raw)
        if found in self.known or found == ROOT:
            return found
        ends = (ModulePath(found[at:]) for at in range(1, len(found)))
        return next((end for end in ends if end in self.known), found)  # reached through a closure or a list

    def _unsliced(self, raw: str) -> ModulePath:
        found = ROOT
        names: list[str] | None = None
        for segment in segments(raw):
            part = _slice(segment)
            if part is not None:
                names = (self.members.get(found, []) if names is None else names)[part]
            elif names is not None:
                found = found.child(self._member(found, names, segment))
                names = None
            else:
                found = found.child(segment)
        return found

    def _member(self, container: ModulePath, names: list[str], segment: str) -> str:
        if container not in self.kept and _can_be_counted(segment, names):
            return names[int(segment)]
        return segment


def _slice(segment: str) -> slice | None:
    """The part of a container that a segment of a path stands for."""
    found = _SLICE.fullmatch(segment)
    if found is None:
        return None
    return slice(*(None if text == "None" else int(text) for text in found.groups()))


def spelling_of(
    modules: Iterable[str], nodes: Iterable[fx.Node], owners: Mapping[str, ModulePath]
) -> Spelling:
    """How to read the paths of these nodes.

    `owners` are the modules whose state placeholders are: it says which reading of a slice is right.
    """
    paths = list(map(segments, modules))
    known = frozenset(paths) - {ROOT}
    members: dict[ModulePath, list[str]] = {}
    for path in paths:
        if path != ROOT:
            members.setdefault(path.parent, []).append(path.name)
    counted = Spelling(known, members)
    return Spelling(known, members, frozenset(_keeping_names(counted, nodes, owners)))


def _keeping_names(
    counted: Spelling, nodes: Iterable[fx.Node], owners: Mapping[str, ModulePath]
) -> Iterator[ModulePath]:
    """Containers whose slices keep the names of members: those that were called themselves, and those where
    counting from zero leads to a module that does not hold what is read there."""
    for node in nodes:
        sources = [source.name for source in node.all_input_nodes if source.op == "placeholder"]
        read = next((owners[name] for name in reversed(sources) if name in owners), None)
        for raw, *_ in node.meta.get(STACK, {}).values():
            parts = segments(str(raw))
            found = ((at, part) for at, segment in enumerate(parts) if (part := _slice(segment)) is not None)
            at, part = next(found, (0, None))
            if part is None:
                continue
            container = ModulePath(parts[:at])
            names = counted.members.get(container, [])[part]
            if (
                at == len(parts) - 1
                or not _can_be_counted(parts[at + 1], names)
                or (parts[at + 1] in names and _contradicts(counted, str(raw), read))
            ):
                yield container


def _can_be_counted(segment: str, names: list[str]) -> bool:
    return segment.isdigit() and int(segment) < len(names)


def _contradicts(counted: Spelling, raw: str, read: ModulePath | None) -> bool:
    return read is not None and not read.is_within(counted.path(raw))


def source_of(node: fx.Node) -> Source | None:
    """The innermost line that is not PyTorch's own, or else the innermost; None where nothing was kept."""
    found = _ENTRY.findall(str(node.meta.get("stack_trace") or ""))
    lines = [Source(file, int(line), function) for file, line, function in found]
    own = [line for line in lines if not line.file.startswith(TORCH)]
    return next(reversed(own or lines), None)
