"""The hierarchy of modules of an exported program, as far as it can be known without the model."""

from itertools import takewhile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from whence._torch.operators import op_name
from whence.interop.frames import Frame, segments
from whence.interop.state import State
from whence.program import ModuleRecord
from whence.provenance import ROOT, ModulePath
from whence.schema import InputKind

UNKNOWN = "Module"
"""The class of a module that was never called: the export does not say."""
_LISTS = ("ModuleList", "Sequential")
_FLAGS = {"aten.dropout.default": 2, "aten.batch_norm.default": 5, "aten.native_dropout.default": 2}
_FLAGS |= {"aten._native_batch_norm_legit_functional.default": 5, "aten.instance_norm.default": 5}
_FLAGS |= {"aten.feature_dropout.default": 2, "aten.alpha_dropout.default": 2}


@dataclass(frozen=True)
class Held:
    """The state that one module holds: attribute name, tensor, and how it is held under that name."""

    parameters: list[tuple[str, str]] = field(default_factory=list)
    buffers: list[tuple[str, str, bool]] = field(default_factory=list)
    tensors: list[tuple[str, str]] = field(default_factory=list)


def module_paths(exported: ExportedProgram, rows: Iterable[State], called: Iterable[ModulePath]) -> list[ModulePath]:
    """Every module, parents before children, in the model's own order."""
    found: dict[ModulePath, None] = {ROOT: None}
    listed = [segments(entry.fqn.partition("@")[0]) for entry in exported.module_call_graph]
    held = (name.path.parent for row in rows for name in row.names if name.kind is not InputKind.CONSTANT)
    for path in (*listed, *held, *called):
        found.update(dict.fromkeys(path.prefixes()))
    return _nested_in_order(list(found))


def _nested_in_order(paths: Sequence[ModulePath]) -> list[ModulePath]:
    """Children right behind their parent, as a walk over a model meets them."""
    inside: dict[ModulePath, list[ModulePath]] = {}
    for path in paths:
        if path != ROOT:
            inside.setdefault(path.parent, []).append(path)
    ordered, waiting = [], [ROOT]
    while waiting:
        path = waiting.pop()
        ordered.append(path)
        waiting += reversed(inside.get(path, []))
    return ordered


def records_of(
    paths: Sequence[ModulePath],
    rows: Sequence[State],
    frames: Iterable[Frame],
    kind: str,
    training: Mapping[ModulePath, bool],
) -> tuple[ModuleRecord, ...]:
    """The modules, with their state, their classes where they were called, and which are one under two names."""
    seen = list(frames)
    types = {frame.path: frame.type for frame in seen} | {ROOT: kind}
    found = _held_by(rows)
    held = {path: found.get(path, Held()) for path in paths}
    same = _same_modules(paths, held, types, seen)
    children: dict[ModulePath, list[str]] = {path: [] for path in paths}
    for path in paths[1:]:
        children[path.parent].append(path.name)
    usual = all(training.values()) if training else True
    return tuple(
        ModuleRecord(
            path=path,
            type=(known := types.get(path) or _guessed(children[path], held[path])),
            container=known if known in _CONTAINERS else None,
            training=_mode(path, training, usual),
            parameters=tuple(held[path].parameters),
            buffers=tuple(held[path].buffers),
            tensors=tuple(held[path].tensors),
            same_as=same.get(path),
            children=tuple(children[path]),
        )
        for path in paths
    )


_CONTAINERS = frozenset({*_LISTS, "ModuleDict", "ParameterList", "ParameterDict"})


def _guessed(children: Sequence[str], held: Held) -> str:
    """A module that is never called, and numbers what it holds, is a list."""
    own = [name for name, *_ in (*held.parameters, *held.buffers, *held.tensors)]
    if children and not own and _counted(children):
        return "ModuleList"
    parameters = [name for name, _ in held.parameters]
    if parameters and not children and own == parameters and _counted(parameters):
        return "ParameterList"
    return UNKNOWN


def _counted(names: Sequence[str]) -> bool:
    return list(names) == [str(number) for number in range(len(names))]


def _held_by(rows: Iterable[State]) -> dict[ModulePath, Held]:
    """What each module holds itself."""
    found: dict[ModulePath, Held] = {}
    for row in rows:
        for name in row.names:
            path = name.path
            own = found.setdefault(path.parent, Held())
            match name.kind:
                case InputKind.PARAMETER:
                    own.parameters.append((path.name, row.name))
                case InputKind.BUFFER:
                    own.buffers.append((path.name, row.name, name.persistent))
                case _:
                    own.tensors.append((path.name, row.name))
    return found


def _same_modules(
    paths: Sequence[ModulePath], held: Mapping[ModulePath, Held], types: Mapping[ModulePath, str], seen: Iterable[Frame]
) -> dict[ModulePath, ModulePath]:
    """The first path of each module that has several.

    In strict mode the export says so. Otherwise two names of one class are one module where they hold the same
    tensors, all of them, and at least one.
    """
    spoken: dict[ModulePath, str] = {
        frame.path: frame.identity for frame in seen if frame.identity.isdigit()
    }
    first: dict[Any, ModulePath] = {}
    same: dict[ModulePath, ModulePath] = {}
    for position, path in enumerate(paths):
        if path.parent in same and path != ROOT:  # what is inside one module is inside it under both names
            other = ModulePath((*same[path.parent], path.name))
            same |= {path: same.get(other, other)} if other in held else {}
            continue
        key = spoken.get(path) or _contents(path, paths[position:], held, types)
        if key is not None and (known := first.setdefault(key, path)) != path and not path.is_within(known):
            same[path] = known
    return same


def _contents(
    path: ModulePath, behind: Sequence[ModulePath], held: Mapping[ModulePath, Held], types: Mapping[ModulePath, str]
) -> Any:
    """All that a module and those inside it hold; None where that is nothing, or the class is not known."""
    if path == ROOT or path not in types:
        return None
    inside = [(other.relative_to(path), held[other]) for other in takewhile(lambda p: p.is_within(path), behind)]
    has_state = any(own.parameters or own.buffers for _, own in inside)
    return (types[path], repr(inside)) if has_state else None


def training_flags(nodes: Iterable[fx.Node], homes: Mapping[fx.Node, ModulePath]) -> dict[ModulePath, bool]:
    """The mode of every module whose operations say it."""
    return {homes[node]: flag for node in nodes for flag in _flag(node)}


def _flag(node: fx.Node) -> Iterator[bool]:
    position = _FLAGS.get(op_name(node.target)) if node.op == "call_function" else None
    if position is not None and len(node.args) > position:
        yield bool(node.args[position])


def _mode(path: ModulePath, training: Mapping[ModulePath, bool], usual: bool) -> bool:
    """As the module's own operations say, or those inside it, or those of the whole model."""
    own = [flag for other, flag in training.items() if other.is_within(path)]
    return training.get(path, all(own) if own else usual)
