"""Run a program, and read or replace values on the way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from whence._torch.pytrees import tree_flatten
from whence.errors import SelectionError, UsageError
from whence.execution.values.walk import Patch, inputs_of, walk
from whence.program import Call, FlatProgram, Named, Structure
from whence.program.queries.selecting import SEPARATOR
from whence.program.signature import describe
from whence.provenance import CallSite

ValueKey = str | fx.Node | CallSite | Call
"""A node or its name, a call of a module (`layers.3.mlp`, `lin@1`), or a pattern as `select` takes it."""


@dataclass(frozen=True, repr=False)
class Values:
    """What one run of a program computed.

    `outputs` are what it returns by the names of the signature's outputs: results, loss, gradients and new
    values of what is written. `read` is what was asked for: the value of a node; for a call what it returned,
    in its own structure; for a pattern a dictionary by name of node.
    """

    outputs: Mapping[str, Any]
    read: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: ValueKey) -> Any:
        """What was read under that name; raises `KeyError` for what was not asked for."""
        return self.read[name_of(key)]

    def __repr__(self) -> str:
        return f"<{len(self.outputs):,} outputs, {len(self.read):,} read>"


def run(
    program: FlatProgram,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    *,
    read: ValueKey | Sequence[ValueKey],
    patch: Mapping[Any, Any],
    inputs: Mapping[str, Any],
) -> Values:
    """What the program computes on these arguments; nothing is changed."""
    keys = [read] if isinstance(read, (str, fx.Node, CallSite, Call)) else read
    wanted = {name_of(each): _target(program, each) for each in keys}
    patches = dict(_patches(program, patch))
    returned = [row for row in program.signature.outputs if row.node is not None]
    names = {name for target in wanted.values() for name in _names(target)}
    patched = {name for each in patch for name in _names(_target(program, each))}
    keep = frozenset(names | patched | {str(row.node) for row in returned})
    values: Mapping[str, Any] = {}
    for _, now in walk(program, inputs_of(program, args, kwargs, inputs), patches=patches, keep=keep):
        values = now
    rows = program.signature.outputs
    found = {row.name: row.value if row.node is None else values[row.node] for row in rows}
    return Values(found, {name: _filled(target, values) for name, target in wanted.items()})


def name_of(key: ValueKey) -> str:
    """The text under which something that was asked for is found."""
    if isinstance(key, Call):
        return str(key.site)
    return key.name if isinstance(key, fx.Node) else str(key)


def _target(program: FlatProgram, key: ValueKey) -> str | Structure | list[str]:
    """The node, the structure of nodes, or the nodes that are meant."""
    if isinstance(key, str) and SEPARATOR in key:
        nodes = [node.name for node in program.select(key) if node.graph is program.graph]
        if not nodes:
            raise _of_a_branch(key)
        return nodes
    name = name_of(key)
    call = next((call for call in program.calls if str(call.site) == name), None)
    if isinstance(key, fx.Node) or call is None:
        return program.node(name).name
    if call.outputs is None:
        raise _of_a_branch(call.label)
    return call.outputs


def _of_a_branch(what: str) -> SelectionError:
    return SelectionError(
        f"{what} runs inside a branch or a loop, whose values are its own",
        remedy="read what the branch gives, a node of the program",
    )


def _names(target: str | Structure | list[str]) -> Sequence[str]:
    if isinstance(target, Structure):
        return target.names
    return [target] if isinstance(target, str) else target


def _filled(target: str | Structure | list[str], values: Mapping[str, Any]) -> Any:
    if isinstance(target, Structure):
        return target.filled(dict(values))
    return values[target] if isinstance(target, str) else {name: values[name] for name in target}


def _patches(program: FlatProgram, patch: Mapping[Any, Any]) -> Iterator[tuple[str, Patch]]:
    order = {node.name: at for at, node in enumerate(program.graph.nodes)}
    for key, new in patch.items():
        target = _target(program, key)
        if not (names := _names(target)) or isinstance(target, list):
            raise UsageError(
                f"{name_of(key)} cannot be patched: it is no one value of the program",
                remedy="name a node, or a call that returns a tensor",
            )
        yield max(names, key=order.__getitem__), _replacing(name_of(key), target, new)


def _replacing(what: str, target: str | Structure, new: Any) -> Patch:
    """The values that take the place of a node's, or of what a call returned."""
    make: Callable[[Any], Any] = new if callable(new) and not isinstance(new, Tensor) else lambda _: new

    def patch(values: Mapping[str, Any]) -> Mapping[str, Any]:
        before = _filled(target, values)
        made = make(before)
        (leaves, spec), (was, shape) = tree_flatten(made), tree_flatten(before)
        if spec != shape or any(map(_differ, leaves, was)):
            raise UsageError(
                f"the patch of {what} gives {', '.join(map(describe, leaves))}, and there was "
                f"{', '.join(map(describe, was))}",
                remedy="give tensors of the same shape and dtype, in the same structure",
            )
        if isinstance(target, str):
            return {target: made}
        pairs = zip(target.leaves, leaves, strict=True)
        return {leaf.name: value for leaf, value in pairs if isinstance(leaf, Named)}

    return patch


def _differ(new: Any, old: Any) -> bool:
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return isinstance(new, Tensor) != isinstance(old, Tensor)
    return new.shape != old.shape or new.dtype != old.dtype
