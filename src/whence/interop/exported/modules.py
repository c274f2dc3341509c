"""The hierarchy of modules of an exported program, as far as it can be known without the model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.export import ExportedProgram

from whence._torch.operators.table import said_of
from whence.interop.exported.shared_modules import Chain, instances_of
from whence.interop.exported.state import ModuleState, State, held_by
from whence.interop.graphs.frames import segments
from whence.program import ModuleRecord
from whence.provenance import ROOT, ModulePath
from whence.schema import InputKind

UNKNOWN = "Module"
"""The class of a module that was never called: the export does not say."""
_LISTS = ("ModuleList", "Sequential")


def module_paths(
    exported: ExportedProgram, rows: Iterable[State], called: Iterable[ModulePath]
) -> list[ModulePath]:
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
    chains: Sequence[Chain],
    reads: Iterable[tuple[ModulePath, str]],
    kind: str,
    training: Mapping[ModulePath, bool],
) -> tuple[ModuleRecord, ...]:
    """The modules, with their state, their classes where they were called, and which are one under two names.

    `reads` pairs the module of a call with the inputs that the call reads.
    """
    types = {frame.path: frame.type for chain in chains for frame in chain if frame.type} | {ROOT: kind}
    known = held_by(rows)
    held = {path: known.get(path, ModuleState()) for path in paths}
    instances = instances_of(paths, held, types, chains, _foreign(rows, reads))
    names: dict[ModulePath, list[ModulePath]] = {}
    for path in paths:
        names.setdefault(instances.first(path), []).append(path)
    usual = all(training.values()) if training else True
    children = _children(paths)
    return tuple(
        _record_of_name(path, names[first], _Facts(held, types, children), _mode(path, training, usual))
        for path in paths
        for first in (instances.first(path),)
    )


@dataclass(frozen=True)
class _Facts:
    held: Mapping[ModulePath, ModuleState]
    types: Mapping[ModulePath, str]
    children: Mapping[ModulePath, list[str]]


def _record_of_name(
    path: ModulePath, names: Sequence[ModulePath], facts: _Facts, training: bool
) -> ModuleRecord:
    """One name of a module that has all of `names`."""
    held = facts.held[path].with_all_of(facts.held[name] for name in names)
    spoken = next((facts.types[name] for name in (path, *names) if name in facts.types), None)
    children = facts.children[path]
    kind = spoken or _guessed(children, held)
    return ModuleRecord(
        path=path,
        type=kind,
        container=kind if kind in _CONTAINERS else None,
        training=training,
        parameters=tuple(held.parameters),
        buffers=tuple(held.buffers),
        tensors=tuple(held.tensors),
        same_as=None if path == names[0] else names[0],
        children=tuple(children),
    )


def _children(paths: Sequence[ModulePath]) -> dict[ModulePath, list[str]]:
    children: dict[ModulePath, list[str]] = {path: [] for path in paths}
    for path in paths[1:]:
        children[path.parent].append(path.name)
    return children


def _foreign(
    rows: Iterable[State], reads: Iterable[tuple[ModulePath, str]]
) -> Iterator[tuple[ModulePath, ModulePath]]:
    """The calls that read what their module does not hold, with the modules that do."""
    owners = {row.name: [name.path.parent for name in row.names] for row in rows}
    for reader, name in dict.fromkeys(reads):
        if reader not in owners[name]:
            yield from ((reader, owner) for owner in owners[name])


_CONTAINERS = frozenset({*_LISTS, "ModuleDict", "ParameterList", "ParameterDict"})


def _guessed(children: Sequence[str], held: ModuleState) -> str:
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


def training_flags(nodes: Iterable[fx.Node], homes: Mapping[fx.Node, ModulePath]) -> dict[ModulePath, bool]:
    """The mode of every module whose operations say it."""
    return {homes[node]: flag for node in nodes for flag in _flag(node)}


def _flag(node: fx.Node) -> Iterator[bool]:
    position = said_of(node.target).training
    if position is not None and len(node.args) > position:
        yield bool(node.args[position])


def _mode(path: ModulePath, training: Mapping[ModulePath, bool], usual: bool) -> bool:
    """As the module's own operations say, or those inside it, or those of the whole model."""
    own = [flag for other, flag in training.items() if other.is_within(path)]
    return training.get(path, all(own) if own else usual)
