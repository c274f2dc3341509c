"""Run a program, and read or replace values on the way."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, fx

from whence._torch.pytrees import tree_flatten
from whence.errors import Fault, SelectionError, UsageError
from whence.execution.values.repeated import repeats_of
from whence.execution.values.walk import Given, Patch, detached, inputs_of, walk
from whence.program import Call, FlatProgram, Named, Structure
from whence.program.queries.selecting import SEPARATOR, TYPE, near_paths, select_calls
from whence.program.signature import describe
from whence.provenance import CallSite

ValueKey = str | fx.Node | CallSite | Call
"""A node or its name, the path of a module, a call (`lin@1`), or a pattern as `select` takes it."""

_KEYS = (str, fx.Node, CallSite, Call)
_OF_SEVERAL = ("*", "?", "[", TYPE)
_OF_PATTERNS = (*_OF_SEVERAL, "@")


@dataclass(frozen=True, repr=False)
class Values:
    """What one run of a program computed.

    `outputs` are what it returns by the names of the signature's outputs: results, loss, gradients and new
    values of what is written. `read` is what was asked for: the value of a node; for a call what it returned,
    in its own structure. For what may mean several it is a dictionary: by call (`lin`, `lin@1`) for a module
    that is called more than once and for patterns of calls, by name of node for patterns of operations.
    """

    outputs: Mapping[str, Any]
    read: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: ValueKey) -> Any:
        """What was read under that name; raises `KeyError` for what was not asked for."""
        return self.read[name_of(key)]

    def __repr__(self) -> str:
        return f"<{len(self.outputs):,} outputs, {len(self.read):,} read>"


def run(
    program: FlatProgram, given: Given, *, read: ValueKey | Sequence[ValueKey], patch: Mapping[Any, Any]
) -> Values:
    """What the program computes on these arguments; nothing is changed."""
    keys = [read] if isinstance(read, _KEYS) or not isinstance(read, Iterable) else [*read]
    UsageError.refuse(_unusable(each) for each in (*keys, *patch) if not isinstance(each, _KEYS))
    wanted = {name_of(each): _meant(program, each) for each in keys}
    patched = {name for each in patch for name in _meant(program, each).names}
    patches = {**_patches_again(program, patched), **dict(_patches(program, patch))}
    returned = [row for row in program.signature.outputs if row.node is not None]
    names = {name for each in wanted.values() for name in each.names}
    keep = frozenset(names | patched | {str(row.node) for row in returned})
    values: Mapping[str, Any] = {}
    for _, now in walk(program, inputs_of(program, *given), patches=patches, keep=keep):
        values = now
    values = {name: detached(values[name]) for name in keep}
    rows = program.signature.outputs
    found = {row.name: row.value if row.node is None else values[row.node] for row in rows}
    return Values(found, {name: each.filled(values) for name, each in wanted.items()})


def _unusable(key: object) -> Fault:
    return Fault(
        f"nothing is found under {key!r}, of the class {type(key).__name__}",
        remedy="give a node, a call, or the name or a pattern of such",
    )


def name_of(key: ValueKey) -> str:
    """The text under which something that was asked for is found."""
    if isinstance(key, (CallSite, Call)):
        site = key.site if isinstance(key, Call) else key
        return f"{site.path}@{site.index}"  # the path alone may mean several
    return key.name if isinstance(key, fx.Node) else str(key)


Target = str | Structure
"""A node, or the structure of the nodes that a call returned."""


@dataclass(frozen=True)
class _Meant:
    """What a key means: values by name of node or call; one alone where it can mean no other."""

    targets: Mapping[str, Target]
    alone: bool

    @property
    def names(self) -> set[str]:
        return {name for target in self.targets.values() for name in _target_names(target)}

    def filled(self, values: Mapping[str, Any]) -> Any:
        found = {name: _target_value(target, values) for name, target in self.targets.items()}
        return next(iter(found.values())) if self.alone else found


def _meant(program: FlatProgram, key: ValueKey) -> _Meant:
    if isinstance(key, (CallSite, Call)):
        site = key.site if isinstance(key, Call) else key
        return _returned_by([program.calls.at(str(site.path), site.index)], alone=True)
    if isinstance(key, fx.Node):
        return _Meant({key.name: program.node(key.name).name}, alone=True)
    if calls := [call for call in program.calls if str(call.site.path) == key]:
        return _returned_by(calls, alone=len(calls) == 1)
    if SEPARATOR in key or ("=" in key and not key.startswith(TYPE)):
        return _nodes(program, key)
    if not any(sign in key for sign in _OF_PATTERNS):
        return _Meant({key: _named_node(program, key)}, alone=True)
    calls = select_calls(program, key)
    return _returned_by(calls, alone=len(calls) == 1 and not any(sign in key for sign in _OF_SEVERAL))


def _returned_by(calls: Sequence[Call], *, alone: bool) -> _Meant:
    """What they returned; calls in branches and loops hand out nothing that the program has."""
    found = {str(call.site): call.outputs for call in calls if call.outputs is not None}
    if not found:
        raise _of_a_branch(calls[0].label)
    return _Meant(found, alone)


def _named_node(program: FlatProgram, name: str) -> str:
    names = [node.name for node in program.graph.nodes]
    if name not in names:
        near = near_paths(name, program.calls, names)
        raise SelectionError(f"no call and no node is called {name!r}", remedy=near)
    return name


def _nodes(program: FlatProgram, pattern: str) -> _Meant:
    names = [node.name for node in program.select(pattern) if node.graph is program.graph]
    if not names:
        raise _of_a_branch(pattern)
    return _Meant({name: name for name in names}, alone=False)


def _of_a_branch(what: str) -> SelectionError:
    return SelectionError(
        f"{what} runs inside a branch or a loop, whose values are its own",
        remedy="read what the branch gives, a node of the program",
    )


def _target_names(target: Target) -> Sequence[str]:
    return target.names if isinstance(target, Structure) else [target]


def _target_value(target: Target, values: Mapping[str, Any]) -> Any:
    return target.filled(dict(values)) if isinstance(target, Structure) else values[target]


def _patches(program: FlatProgram, patch: Mapping[Any, Any]) -> Iterator[tuple[str, Patch]]:
    order = {node.name: at for at, node in enumerate(program.graph.nodes)}
    for key, new in patch.items():
        for what, target in _meant(program, key).targets.items():
            if not (names := _target_names(target)):
                raise UsageError(
                    f"{what} cannot be patched: it is no value of the program",
                    remedy="name a node, or a call that returns a tensor",
                )
            yield max(names, key=order.__getitem__), _replacing(what, target, new)


def _patches_again(program: FlatProgram, patched: Set[str]) -> dict[str, Patch]:
    """What a checkpoint computes again is what took the place of it the first time."""
    pairs = repeats_of(program, patched) if patched else {}
    return {name: partial(_as_before, name, of) for name, of in pairs.items()}


def _as_before(name: str, of: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: values[of]}


def _replacing(what: str, target: Target, new: Any) -> Patch:
    """The values that take the place of a node's, or of what a call returned."""
    make: Callable[[Any], Any] = new if callable(new) and not isinstance(new, Tensor) else lambda _: new

    def patch(values: Mapping[str, Any]) -> Mapping[str, Any]:
        before = _target_value(target, values)
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
