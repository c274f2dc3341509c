"""The state of an exported program: parameters, buffers and constants, each once under all its names."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind as ExportedKind

from whence._torch.export.programs import shares_storage
from whence._torch.operators.schemas import written_nodes
from whence._torch.tensors import storage_of
from whence.errors import Fault, Place
from whence.interop.graphs.call_sites import Sites
from whence.interop.graphs.frames import segments
from whence.interop.graphs.inline import Flat
from whence.program import Call
from whence.program.names import state_name
from whence.provenance import ModulePath
from whence.rewriting.functionalize import Functional
from whence.schema import InputKind

_KINDS = {
    ExportedKind.PARAMETER: InputKind.PARAMETER,
    ExportedKind.BUFFER: InputKind.BUFFER,
    ExportedKind.CONSTANT_TENSOR: InputKind.CONSTANT,
}
_ORDER = tuple(_KINDS.values())
LITERAL = "lifted_tensor_"
"""How torch.export names tensors that were written down in forward: each call has its own."""
aten = torch.ops.aten


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
    for named in _in_order(exported, list(_constants_by_name(exported, unused))):
        groups.setdefault(_tensor_identity(named.tensor), []).append(named)
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


def _constants_by_name(exported: ExportedProgram, unused: Mapping[str, Tensor]) -> Iterator[NamedTensor]:
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


def _tensor_identity(tensor: Tensor) -> Any:
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


def read_through_one(flat: Flat, rows: Sequence[State], placeholders: Mapping[str, fx.Node]) -> None:
    """Read every tensor that shares its memory with a written one as a view of the one that covers both.

    In a functional graph two inputs are two values, and neither would see the other change.
    """
    groups = in_one_memory(rows)
    if not groups or not any(written_nodes(node) for node in flat.graph.nodes if node.op == "call_function"):
        return
    for group in groups:
        whole = whole_of(group)
        if whole is None:
            flat.faults.append(_no_whole(group))
            continue
        for row in group:
            if row is not whole and placeholders[row.name].users:
                _look_through(flat.graph, placeholders[row.name], placeholders[whole.name], row)


def _look_through(graph: fx.Graph, placeholder: fx.Node, whole: fx.Node, row: State) -> None:
    tensor = row.tensor
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        arguments = (whole, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        view = graph.call_function(aten.as_strided.default, arguments)
    view.meta["val"] = aten.as_strided.default(whole.meta["val"], *arguments[1:])
    placeholder.replace_all_uses_with(view)


def _no_whole(group: Sequence[State]) -> Fault:
    names = ", ".join(row.first.target for row in group)
    return Fault(
        f"{names} look into one memory, and the graph writes to state",
        where=Place(str(group[0].first.path.parent)),
        why="none of them covers the others, and in a functional graph they are separate values",
        remedy="register the tensor that they are views of as a buffer, and take the views in forward",
    )


def histories(
    written: Mapping[str, fx.Node], functional: Functional, sites: Sites
) -> dict[str, tuple[str, ...]]:
    """The values of each written input in order, by name.

    Where writes are operations they say so. A decomposed export says only what a buffer holds in the end:
    which values it had between several calls of its module follows from where the first of these reads it.
    """
    noted = {node.name: [value.name for value in values] for node, values in functional.history.items()}
    return {
        name: tuple(dict.fromkeys((*noted.get(name, ()), *_between(name, value, noted, sites), value.name)))
        for name, value in written.items()
    }


def _between(name: str, last: fx.Node, noted: Mapping[str, object], sites: Sites) -> Iterator[str]:
    """What later calls of a module read where its first one reads a buffer that only the signature writes."""
    state = next((node for node in last.graph.find_nodes(op="placeholder") if node.name == name), None)
    if state is None or name in noted:
        return
    calls = {sites.homes[user] for user in state.users if user in sites.homes}
    if len(calls) != 1:
        return
    (first,) = (sites.calls.rows[number] for number in calls)
    nodes = _nodes_of(first, sites)
    for later in sites.calls:
        if later.number > first.number and later.site.path == first.site.path:
            found = _in_the_place_of(state, nodes, _nodes_of(later, sites))
            if found is not None:
                yield found.name


def _nodes_of(call: Call, sites: Sites) -> list[fx.Node]:
    return [node for node, home in sites.homes.items() if home == call.number]


def _in_the_place_of(state: fx.Node, nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> fx.Node | None:
    """The one value that these nodes read wherever those of the first call, which do the same, read it."""
    if [node.target for node in nodes] != [node.target for node in others]:
        return None
    pairs = (
        zip(one.all_input_nodes, other.all_input_nodes, strict=False)
        for one, other in zip(nodes, others, strict=True)
    )
    found = {theirs for pair in pairs for ours, theirs in pair if ours is state}
    return found.pop() if len(found) == 1 and state not in found else None
