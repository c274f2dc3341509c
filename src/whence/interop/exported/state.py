"""The state of an exported program: parameters, buffers and constants, each once under all its names."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as ExportedKind

from whence._torch.export.programs import shares_storage
from whence._torch.tensors import storage_of
from whence.interop.graphs.frames import segments
from whence.program.names import state_name
from whence.provenance import ModulePath
from whence.schema import InputKind

_KINDS = {
    ExportedKind.PARAMETER: InputKind.PARAMETER,
    ExportedKind.BUFFER: InputKind.BUFFER,
    ExportedKind.CONSTANT_TENSOR: InputKind.CONSTANT,
}
_ORDER = tuple(_KINDS.values())


@dataclass(frozen=True)
class NamedTensor:
    """A tensor under one name; `placeholder` is None for one that the graph does not take."""

    target: str
    kind: InputKind
    tensor: Tensor
    placeholder: str | None = None
    persistent: bool = True

    @property
    def path(self) -> ModulePath:
        return segments(self.target)


@dataclass(frozen=True)
class State:
    """One tensor under all its names; the first is the one it is known by."""

    names: tuple[NamedTensor, ...]

    @property
    def first(self) -> NamedTensor:
        """The name it is known by."""
        return self.names[0]

    @property
    def tensor(self) -> Tensor:
        return self.first.tensor

    @property
    def kind(self) -> InputKind:
        """What it is under the first of its names."""
        return min((name.kind for name in self.names), key=_ORDER.index)

    @property
    def persistent(self) -> bool:
        """Whether a state dict has it."""
        return any(name.persistent for name in self.names)

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The placeholders that take it."""
        return tuple(name.placeholder for name in self.names if name.placeholder is not None)

    @property
    def name(self) -> str:
        """What its placeholder is to be called."""
        return next(iter(self.placeholders), state_name(self.kind, self.first.path))


def state_of(exported: ExportedProgram, unused: Mapping[str, Tensor]) -> tuple[State, ...]:
    """Parameters, then buffers, then constants, in the order of the model's own state dict.

    `unused` are buffers of the model that the export left out, by their names.

    What is one tensor in the model is one row, also where the graph has a placeholder for each of its names,
    and where the names came back from a file as several tensors in one memory: of these the graph uses one.
    """
    groups: dict[Any, list[NamedTensor]] = {}
    for named in _in_order(exported, list(_named(exported, unused))):
        groups.setdefault(_identity(named.tensor), []).append(named)
    used = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
    rows = [State(tuple(names)) for group in groups.values() for names in _split(group, used)]
    return tuple(sorted(rows, key=lambda row: _ORDER.index(row.kind)))


def _split(names: list[NamedTensor], used: Collection[str]) -> list[list[NamedTensor]]:
    """Names of one memory, apart where they are of several tensors that the graph uses as such."""
    if len({id(name.tensor) for name in names if name.placeholder in used}) < 2:
        return [names]
    groups: dict[int, list[NamedTensor]] = {}
    for name in names:
        groups.setdefault(id(name.tensor), []).append(name)
    return list(groups.values())


def _named(exported: ExportedProgram, unused: Mapping[str, Tensor]) -> Iterator[NamedTensor]:
    known: set[str] = set()
    for spec in exported.graph_signature.input_specs:
        kind = _KINDS.get(spec.kind)
        if kind is None or spec.target is None:
            continue
        known.add(spec.target)
        held = exported.state_dict if spec.target in exported.state_dict else exported.constants
        persistent = kind is InputKind.PARAMETER or (
            kind is InputKind.BUFFER and spec.persistent is not False
        )
        yield NamedTensor(spec.target, kind, held[spec.target], spec.arg.name, persistent)
    for target, tensor in exported.state_dict.items():
        if target not in known:
            kind = InputKind.PARAMETER if isinstance(tensor, nn.Parameter) else InputKind.BUFFER
            yield NamedTensor(target, kind, tensor)
    for target, tensor in unused.items():
        if target not in known and target not in exported.state_dict:
            known.add(target)
            yield NamedTensor(target, InputKind.BUFFER, tensor, None, persistent=False)
    for target, value in exported.constants.items():
        if target not in known and isinstance(value, Tensor):
            yield NamedTensor(target, InputKind.CONSTANT, value, None, persistent=False)


def _in_order(exported: ExportedProgram, rows: Sequence[NamedTensor]) -> list[NamedTensor]:
    order = {target: position for position, target in enumerate(exported.state_dict)}
    after = len(order)
    ranked = enumerate(rows)
    return [
        row
        for _, row in sorted(ranked, key=lambda pair: (order.get(pair[1].target, after + pair[0]), pair[0]))
    ]


def _identity(tensor: Tensor) -> Any:
    """What is equal for two names of one tensor."""
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return id(tensor)
    place = (storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
    return (*place, tensor.dtype, isinstance(tensor, nn.Parameter), tensor.requires_grad)


def in_one_memory(rows: Iterable[State]) -> list[list[State]]:
    """Groups of different tensors that look into one memory."""
    groups: list[list[State]] = []
    for row in rows:
        around = next((group for group in groups if shares_storage(group[0].tensor, row.tensor)), None)
        if around is None:
            groups.append([row])
        else:
            around.append(row)
    return [group for group in groups if len(group) > 1]


def whole_of(group: Sequence[State]) -> State | None:
    """The tensor of a group that covers all the others; None where none does."""
    wholes = (row for row in group if row.tensor.is_contiguous() and row.tensor.storage_offset() == 0)
    whole = max(wholes, key=lambda row: row.tensor.numel(), default=None)
    if whole is None or any(_end(row.tensor) > whole.tensor.numel() for row in group):
        return None
    return whole if all(row.tensor.dtype == whole.tensor.dtype for row in group) else None


def _end(tensor: Tensor) -> int:
    """The position behind the last element, in the memory it looks into."""
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1
