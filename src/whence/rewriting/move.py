"""A forward program on another device, or with state of another dtype: what `module.to` is to a model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from whence._torch.fakes import FakeTensor, fake_at
from whence._torch.graphs import fake_result, own_copy
from whence._torch.pytrees import tree_flatten, tree_map_only
from whence.errors import Fault, Place, UsageError
from whence.program import FlatProgram
from whence.program.arguments.variants import with_variants
from whence.program.guards.expectations import ExpectedTensor
from whence.program.guards.guards import Guards
from whence.program.guards.rows import Guard
from whence.program.queries.failing import OF_OPERATIONS, refuse_failed
from whence.program.signature import Input
from whence.rewriting.decompose import graphs_in
from whence.schema import GuardKind, InputKind, OutputKind

P = TypeVar("P", bound=FlatProgram)
_MOVED = (GuardKind.PARAMETER, GuardKind.BUFFER, GuardKind.INPUT)
_AGAIN = "move the model, and capture it again"


@dataclass(frozen=True)
class Destination:
    """A device, a dtype for what is floating point, or both."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """What a dtype becomes."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def device_of(self, device: torch.device) -> torch.device:
        """What a device becomes."""
        return device if self.device is None else self.device

    def state(self, tensor: Tensor, kind: InputKind) -> Tensor:
        """A copy of a piece of state; constants, which modules do not know, keep their dtype."""
        dtype = tensor.dtype if kind is InputKind.CONSTANT else self.dtype_of(tensor.dtype)
        made = tensor.detach().to(device=self.device_of(tensor.device), dtype=dtype, copy=True)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def fake(self, value: FakeTensor, dtype: torch.dtype) -> Tensor:
        """A fake tensor in the place of another, with its sizes and strides."""
        device = self.device_of(value.device)
        made = fake_at(value.fake_mode, device, dtype, value.shape, value.stride())
        return made.requires_grad_(value.requires_grad)

    def argument(self, value: Any) -> Any:
        """A fake argument, or whatever else stands there."""
        return self.fake(value, self.dtype_of(value.dtype)) if isinstance(value, FakeTensor) else value


def moved(program: P, *where: str | torch.device | torch.dtype) -> P:
    """The program that a capture of the moved model would give; it has copies of the state.

    At the level of PyTorch's export each operator chooses its kernel when it runs. Devices in the graph are
    exchanged, of a device that the model named itself, too, as PyTorch's `move_to_device_pass` does; what it
    names a dtype stays. Raises `UsageError` for what would be another graph there: a program below autograd,
    and, for a dtype, one whose model asked a tensor for its own.
    """
    dtype = next((each for each in where if isinstance(each, torch.dtype)), None)
    device = next((torch.device(each) for each in where if not isinstance(each, torch.dtype)), None)
    to = Destination(device, dtype)
    UsageError.refuse([*_move_faults(program, to)])
    try:
        return with_variants(program, lambda each: _moved(each, to))
    except OF_OPERATIONS as error:
        refuse_failed(program, error)
        raise


def _moved(program: P, to: Destination) -> P:
    state = {row.name: to.state(program.state[row.name], row.kind) for row in program.signature.state}
    held = {row.path: state[row.name] for row in program.signature.attributes}
    module = own_copy(program.graph_module, program.name, held)
    kinds = {row.name: row.kind for row in (*program.signature.attributes, *program.signature.inputs)}
    for graph in graphs_in(module.graph):
        for node in graph.nodes:
            _move(node, to, kinds if graph is module.graph else {})
    values = {node.name: node.meta.get("val") for node in module.graph.nodes}

    def there(rows: Sequence[Input]) -> tuple[Input, ...]:
        return tuple(replace(row, value=values[row.name]) for row in rows)

    held_there, inputs = there(program.signature.attributes), there(program.signature.inputs)
    UsageError.refuse([*_other_writes(program, values)])
    return program.with_changes(
        graph_module=module,
        signature=replace(program.signature, inputs=inputs, attributes=held_there),
        convention=replace(program.convention, leaves=tuple(map(to.argument, program.convention.leaves))),
        state=state,
        guards=_moved_guards(program.guards, to),
    )


def _other_writes(program: FlatProgram, values: Mapping[str, Any]) -> Iterator[Fault]:
    """State that a write would give another dtype: eager casts what it writes."""
    for row in program.signature.outputs_of(OutputKind.MUTATION):
        written, held = values.get(row.node or ""), values.get(row.of or "")
        if isinstance(written, Tensor) and isinstance(held, Tensor) and written.dtype is not held.dtype:
            yield Fault(
                f"{row.path} is {held.dtype} there, and what is written to it {written.dtype}", remedy=_AGAIN
            )


def _move(node: fx.Node, to: Destination, kinds: Mapping[str, InputKind]) -> None:
    """Write what a node computes there, and on which device it makes it."""
    if to.device is not None:
        node.args, node.kwargs = tree_map_only(torch.device, to.device_of, (node.args, node.kwargs))
    value: Any = node.meta.get("val")
    if node.op == "call_function" and to.dtype is not None:
        node.meta["val"] = _as_computed(node, value, to)
    elif kinds.get(node.name) is InputKind.CONSTANT:
        node.meta["val"] = to.fake(value, value.dtype)
    else:
        node.meta["val"] = tree_map_only(FakeTensor, to.argument, value)


def _as_computed(node: fx.Node, value: Any, to: Destination) -> Any:
    """The value of a node with the dtypes that it has there, and otherwise as it was seen."""
    mode = next((held.fake_mode for held in tree_flatten(value)[0] if isinstance(held, FakeTensor)), None)
    if mode is None:
        return value
    with mode:
        found = iter(tree_flatten(fake_result(node.target, node.args, node.kwargs))[0])
    return tree_map_only(FakeTensor, lambda held: to.fake(held, next(found).dtype), value)


def _moved_guards(guards: Guards, to: Destination) -> Guards:
    settled = None if guards.settled is None else _moved_guards(guards.settled, to)
    return replace(guards, rows=tuple(_guard(row, to) for row in guards.rows), settled=settled)


def _guard(row: Guard, to: Destination) -> Guard:
    if row.kind not in _MOVED or not isinstance(row.expected, ExpectedTensor):
        return row
    facts = row.expected.facts
    facts = facts._replace(dtype=to.dtype_of(facts.dtype), device=to.device_of(facts.device))
    return row._replace(expected=replace(row.expected, facts=facts))


def _move_faults(program: FlatProgram, to: Destination) -> Iterator[Fault]:
    if program.has_backward or program.step is not None:
        yield Fault(
            "a program with a backward cannot be moved",
            why="below autograd the kernels, casts and constants in its graph are those of the capture",
            remedy=f"{_AGAIN}: capture(model, ..., device=...) does so for a device that is not here",
        )
    if program.signature.wholes:
        yield Fault("a tensor that is made of others cannot be moved with its program", remedy=_AGAIN)
    devices = {held.device for held in program.state.values()}
    if to.device is not None and len(devices) > 1:
        yield Fault(f"the state is on several devices: {', '.join(sorted(map(str, devices)))}", remedy=_AGAIN)
    if to.dtype is not None:
        yield from _faults_of_dtype(program, to.dtype)


def _faults_of_dtype(program: FlatProgram, dtype: torch.dtype) -> Iterator[Fault]:
    what = f"the program of {program.name} cannot be one in {dtype}"
    asked = program.circumstances.dtype_asked
    if not dtype.is_floating_point:
        yield Fault(f"{dtype} is no floating point dtype", remedy="give one, as to `.to` of a module")
    if asked:
        yield Fault(
            what,
            where=Place(line=asked),
            why="the model asks for the dtype of a tensor there, or casts one: the graph has what that did",
            remedy=f"{_AGAIN}: capture(model.to({dtype}), ...)",
        )
    elif not program.guards.rows:
        yield Fault(what, why="nobody saw what the code behind its graph asked", remedy=_AGAIN)
    if program.circumstances.autocast:
        yield Fault(what, why="autocast chose the casts in its graph", remedy=_AGAIN)
    if len([*graphs_in(program.graph)]) > 1:
        yield Fault(what, why="dtypes inside of branches and loops are not followed", remedy=_AGAIN)
