"""What each module holds itself: attribute names, and the inputs of the program that they stand for."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from whence.interop.exported.state import State
from whence.provenance import ModulePath
from whence.schema import InputKind

LITERAL = "lifted_tensor_"
"""How torch.export names tensors that were written down in forward: each call has its own."""


@dataclass(frozen=True)
class ModuleState:
    """The state of one module."""

    parameters: list[tuple[str, str]] = field(default_factory=list)
    buffers: list[tuple[str, str, bool]] = field(default_factory=list)
    tensors: list[tuple[str, str]] = field(default_factory=list)

    @property
    def contents(self) -> tuple[object, ...]:
        """What two names of one module must agree in."""
        named = (pair for pair in self.tensors if not pair[0].startswith(LITERAL))
        return (*self.parameters, *self.buffers, *named)

    def with_all_of(self, others: Iterable["ModuleState"]) -> "ModuleState":
        """What the module holds under any of its names."""
        every = (self, *others)
        return ModuleState(
            _first_by_name(held.parameters for held in every),
            _first_by_name(held.buffers for held in every),
            _first_by_name(held.tensors for held in every),
        )


def _first_by_name(rows: Iterable[list[Any]]) -> list[Any]:
    found = {row[0]: row for row in reversed([*chain(*rows)])}
    return [*reversed(found.values())]


def held_by(rows: Iterable[State]) -> dict[ModulePath, ModuleState]:
    """What each module holds."""
    found: dict[ModulePath, ModuleState] = {}
    for row in rows:
        for name in row.names:
            path = name.path
            own = found.setdefault(path.parent, ModuleState())
            match name.kind:
                case InputKind.PARAMETER:
                    own.parameters.append((path.name, row.name))
                case InputKind.BUFFER:
                    own.buffers.append((path.name, row.name, name.persistent))
                case _:
                    own.tensors.append((path.name, row.name))
    return found
