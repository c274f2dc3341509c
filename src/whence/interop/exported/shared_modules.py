"""Which names of an exported program's modules are names of one module.

The strict front end has one identity for all names of a module, and uses one of them. Elsewhere two names are
those of one module where it was called by both, their classes agree and they hold the same tensors, all of
them and at least one. What is inside one module is inside it under all its names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from whence.interop.exported.state import ModuleState
from whence.interop.graphs.frames import Frame
from whence.provenance import ROOT, ModulePath

Chain = tuple[Frame, ...]


@dataclass
class Instances:
    """Groups of names; the first in the order of `paths` stands for each."""

    paths: Sequence[ModulePath]
    held: Mapping[ModulePath, ModuleState]
    types: Mapping[ModulePath, str]
    around: dict[ModulePath, ModulePath] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.positions = {path: position for position, path in enumerate(self.paths)}

    def first(self, path: ModulePath) -> ModulePath:
        while path in self.around:
            path = self.around[path]
        return path

    def join(self, one: ModulePath, other: ModulePath) -> None:
        """Two names are of one module, and so are those below them."""
        one, other = sorted((self.first(one), self.first(other)), key=self.positions.__getitem__)
        if one == other or one.is_within(other) or other.is_within(one):
            return
        self.around[other] = one
        for path in self.inside(other)[1:]:
            same = path.moved(other, one)
            if same in self.positions:
                self.join(same, path)

    def inside(self, path: ModulePath) -> list[ModulePath]:
        """A name and all below it."""
        return [*takewhile(lambda other: other.is_within(path), self.paths[self.positions[path] :])]

    def contents(self, path: ModulePath) -> tuple[object, ...]:
        """All that a module and those inside it hold; nothing, where there is no state."""
        inside = [(other.relative_to(path), self.held[other]) for other in self.inside(path)]
        if not any(own.parameters or own.buffers for _, own in inside):
            return ()
        return tuple((name, own.contents) for name, own in inside)


def instances_of(
    paths: Sequence[ModulePath],
    held: Mapping[ModulePath, ModuleState],
    types: Mapping[ModulePath, str],
    chains: Iterable[Chain],
    foreign: Iterable[tuple[ModulePath, ModulePath]],
) -> Instances:
    """The names of each module. `foreign` pairs a call with those whose state it reads and does not hold."""
    found = Instances(paths, held, types)
    chains = list(dict.fromkeys(chains))
    identities = _identities(chains)
    for names in identities.values():
        for name in names[1:]:
            found.join(names[0], name)
    pairs = [*_borrowed(found, chains), *_reading(found, foreign)] if identities else _alike(found)
    for one, other in pairs:
        found.join(one, other)
    return found


def _identities(chains: Iterable[Chain]) -> dict[str, list[ModulePath]]:
    """The names under which strict mode met each module; empty in the other mode."""
    found: dict[str, dict[ModulePath, None]] = {}
    for frame in (frame for chain in chains for frame in chain if frame.identity.isdigit()):
        found.setdefault(frame.identity, {})[frame.path] = None
    return {identity: list(names) for identity, names in found.items()}


def _borrowed(found: Instances, chains: Iterable[Chain]) -> Iterator[tuple[ModulePath, ModulePath]]:
    """A module whose children were called by the names they have in one that holds the same."""
    for chain in chains:
        for caller, called in pairwise(chain):
            other = called.path.parent
            known = caller.path in found.positions and other in found.positions
            if known and other not in (ROOT, caller.path):
                contents = found.contents(caller.path)
                if contents and contents == found.contents(other):
                    yield caller.path, other


def _reading(
    found: Instances, foreign: Iterable[tuple[ModulePath, ModulePath]]
) -> Iterator[tuple[ModulePath, ModulePath]]:
    """A module that reads what another holds, where the two hold a tensor under the same name."""
    for reader, owner in foreign:
        if reader in found.positions and owner in found.positions:
            ours, theirs = found.held[reader], found.held[owner]
            if {*ours.parameters, *ours.buffers} & {*theirs.parameters, *theirs.buffers}:
                yield reader, owner


def _alike(found: Instances) -> Iterator[tuple[ModulePath, ModulePath]]:
    """Modules of one class that hold the same."""
    first: dict[object, ModulePath] = {}
    for path in found.paths:
        contents = found.contents(path) if path in found.types and path != ROOT else ()
        if contents and (known := first.setdefault((found.types[path], contents), path)) != path:
            yield known, path
