"""Take composite operations apart where it matters what they are made of.

Under autocast an operation casts its arguments, and the casts must be in the graph. Where memory is written,
a composite such as `reshape` must say whether it looks into that memory or copies it, and `batch_norm` that
it writes its statistics.
"""

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from whence._torch.exported import Operation, is_composite, looks_into, taken_apart
from whence._torch.graphs import fake_result
from whence._torch.operators import OpOverload, op_name, short_name
from whence.errors import Fault
from whence.interop.aliases import aliases_in, writes_silently
from whence.interop.faults import place_of
from whence.interop.frames import STACK
from whence.interop.inlining import Flat, Region

aten = torch.ops.aten
_KEPT = ("stack_trace", "torch_fn", STACK)


def with_casts(flat: Flat) -> None:
    """Write the casts of autocast regions into the graph.

    The strict front end notes values inside such a region as if there were none, and asserts that they are
    so: what follows from a cast is noted anew, and assertions about it go.
    """
    if not any(region.autocast for region in flat.regions.values()):
        return
    changed: set[fx.Node] = set()
    for node in [node for node in flat.graph.nodes if node.op == "call_function"]:
        stale = not changed.isdisjoint(node.all_input_nodes)
        if stale and node.target is aten._assert_tensor_metadata.default:
            flat.graph.erase_node(node)
            continue
        region, before = flat.regions.get(node, Region()), _dtypes(node.meta.get("val"))
        found = _take_apart(flat, node, region) if region.autocast else node
        if found is node and stale and isinstance(node.target, OpOverload):
            node.meta["val"] = fake_result(node.target, node.args, node.kwargs)
        made = found if isinstance(found, (tuple, list)) else [found]
        if _dtypes([each.meta.get("val") for each in made]) != _dtypes([before]):
            changed.update(made)


def _dtypes(value: Any) -> list[Any]:
    """The dtypes of a value, or of several, in order."""
    if isinstance(value, (tuple, list)):
        return [dtype for item in value for dtype in _dtypes(item)]
    return [value] if isinstance(value, torch.dtype) else [value.dtype] if isinstance(value, Tensor) else []


def without_hidden_writes(flat: Flat) -> None:
    """Take apart composite operations that may look into memory that is written, or write themselves."""
    aliases = aliases_in(flat.graph)
    if not aliases.written:
        return
    groups = {aliases.group(node) for node in aliases.written}
    for node in list(flat.graph.nodes):
        if node.op != "call_function" or not is_composite(node.target):
            continue
        if writes_silently(node) or (looks_into(node.target) and aliases.group(node) in groups):
            _take_apart(flat, node, flat.regions.get(node, Region()))


def _take_apart(flat: Flat, node: fx.Node, region: Region) -> Any:
    """Replace a node by what it does; the node or the nodes that hold its value now."""
    if node.target is operator.getitem:
        return node
    if not isinstance(node.target, OpOverload):
        _refuse(flat, node, "it is no operator, and what it does under autocast cannot be written down")
        return node
    sources = node.all_input_nodes
    values = [source.meta.get("val") for source in sources]

    def call(*given: Any) -> Any:
        held = dict(zip(sources, given, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: held[source])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with torch.no_grad() if region.without_grad else nullcontext():
        operations, result = taken_apart(call, values, region.autocast)
        plain = taken_apart(call, values)[0] if region.autocast else operations
    if region.autocast and _targets(plain) == _targets(operations):
        return node
    splice = _Splice(flat, node, sources, values)
    try:
        for operation in operations:
            splice.add(operation)
        replacement = splice.known(result)
    except _Unknown as unknown:
        _refuse(flat, node, str(unknown))
        return node
    _replace(flat, node, replacement)
    return replacement


def _targets(operations: Sequence[Operation]) -> list[Any]:
    return [operation.target for operation in operations]


def _refuse(flat: Flat, node: fx.Node, why: str) -> None:
    flat.faults.append(
        Fault(
            f"{op_name(node.target)} cannot be taken apart",
            where=place_of(node),
            why=why,
            remedy="call run_decompositions({}) on the exported program first",
        )
    )


def _replace(flat: Flat, node: fx.Node, replacement: Any) -> None:
    if isinstance(replacement, fx.Node):
        node.replace_all_uses_with(replacement)
    else:
        for user in list(node.users):
            if user.target is operator.getitem:
                user.replace_all_uses_with(replacement[user.args[1]])
                _forget(flat, user, replacement[user.args[1]])
    _forget(flat, node, replacement)


def _forget(flat: Flat, node: fx.Node, replacement: Any) -> None:
    for name, value in flat.made.items():
        if value is node:
            flat.made[name] = replacement
    flat.returned = tuple(replacement if value is node else value for value in flat.returned)
    flat.graph.erase_node(node)


class _Unknown(ValueError):
    """A value that comes from nowhere in the graph."""


class _Splice:
    """Writes operations in front of a node."""

    def __init__(self, flat: Flat, node: fx.Node, sources: Sequence[fx.Node], values: Sequence[Any]) -> None:
        self.flat = flat
        self.node = node
        self.nodes = {id(value): source for source, value in zip(sources, values, strict=True)}
        self.sizes = dict(zip(sources, values, strict=True))
        self.alive: list[Any] = list(values)

    def add(self, operation: Operation) -> None:
        """Write one operation."""
        args, kwargs = self._mapped(operation.args), self._mapped(dict(operation.kwargs))
        made = self._node(operation.target, args, kwargs, operation.result)
        self._keep(made, operation.result)

    def known(self, value: Any) -> Any:
        """The node, or the nodes, of a value."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.known, value))
        return self._mapped(value)

    def _keep(self, made: fx.Node, result: Any) -> None:
        self.alive.append(result)
        if isinstance(result, (tuple, list)):
            for position, item in enumerate(result):
                if item is not None:
                    self._keep(self._node(operator.getitem, (made, position), {}, item), item)
        else:
            self.nodes[id(result)] = made

    def _node(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        with self.flat.graph.inserting_before(self.node):
            made = self.flat.graph.create_node("call_function", target, args, kwargs, short_name(target))
        made.meta = {key: self.node.meta[key] for key in _KEPT if key in self.node.meta}
        made.meta["val"] = _without_history(value)
        if self.node in self.flat.regions:
            self.flat.regions[made] = self.flat.regions[self.node]
        return made

    def _mapped(self, value: Any) -> Any:
        match value:
            case tuple() | list():
                return type(value)(map(self._mapped, value))
            case dict():
                return {key: self._mapped(item) for key, item in value.items()}
            case Tensor():
                return self._tensor(value)
            case SymInt():
                return self.nodes.get(id(value)) or self._size(value)
        return value

    def _tensor(self, value: Tensor) -> fx.Node:
        found = self.nodes.get(id(value))
        if found is None:
            raise _Unknown("it makes a tensor that does not come from its arguments")
        return found

    def _size(self, size: SymInt) -> Any:
        for source, value in self.sizes.items():
            if isinstance(value, Tensor):
                for axis, extent in enumerate(value.shape):
                    if str(extent) == str(size):
                        return self._node(aten.sym_size.int, (source, axis), {}, size)
            elif str(value) == str(size):
                return source
        raise _Unknown(f"it computes the size {size}")


def _without_history(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_without_history, value))
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value
