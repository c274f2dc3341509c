"""A call is run and watched: may what it recorded stand for other calls?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from whence._torch.hooks import has_hooks
from whence._torch.modes import modes_now
from whence._torch.operators import written_arguments
from whence._torch.tensors import storage_of
from whence._torch.trees import TreeSpec, tree_flatten
from whence.program.observed import Read
from whence.provenance import Source
from whence.schema import Phase
from whence.tracing.example import is_plain_constant
from whence.tracing.changes import copy_of
from whence.tracing.modules import CONTAINERS, Kept, same_items
from whence.tracing.notes import Notes
from whence.tracing.replay.facts import Facts, facts_of
from whence.tracing.replay.likeness import COMPUTED, NOTHING, Conditions, Look, held, place_of
from whence.tracing.replay.variables import Variables

MIN_NODES = 8
"""From how many operations on copying them pays."""
SMALL = "it is small"


class Unfit(Exception):
    """What a call recorded cannot stand for other calls; the text says why."""


@dataclass
class Seen:
    """What is noted while a watched call runs: what it reads, each with a copy of a container, and what it does
    that is not for other calls."""

    reads: dict[tuple[int, str], tuple[Read, Any]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def read(self, read: Read) -> None:
        """An attribute was read."""
        key = (id(read.holder), read.name)
        if key not in self.reads:
            content = copy_of(read.value) if isinstance(read.value, CONTAINERS) else None
            self.reads[key] = (read, content)


@dataclass(frozen=True)
class Trial:
    """A call that is being watched: where it begins in the notes, what it was given, and the line it is made in."""

    module: nn.Module
    scope: int
    start: int
    spec: TreeSpec
    leaves: tuple[Any, ...]
    nodes: tuple[fx.Node | None, ...]
    modes: tuple[Any, ...]
    seen: Seen
    variables: Variables
    caller: Source | None
    attributes: Sequence[tuple[nn.Module, dict[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """What a watched call returned: its structure, and for every leaf a node, or a constant."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    nodes: tuple[fx.Node | None, ...]


@dataclass(frozen=True)
class Border:
    """The values that cross the border of a call, by the tensors that hold them."""

    inputs: tuple[tuple[fx.Node, Tensor], ...]
    outputs: tuple[tuple[fx.Node, Tensor], ...]


def attributes_below(module: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """A module and those inside it, each with a copy of its attributes, looked at without asking it."""
    waiting, found = [module], dict[int, tuple[nn.Module, dict[str, Any]]]()
    while waiting:
        inner = waiting.pop()
        if id(inner) not in found:
            found[id(inner)] = (inner, dict(vars(inner)))
            waiting += [child for child in vars(inner)["_modules"].values() if child is not None]
    return list(found.values())


def attempted(
    trial: Trial, outcome: Outcome, given: Any, notes: Notes, tensors: Mapping[fx.Node, Tensor], kept: Sequence[Kept]
) -> tuple[Conditions, Border]:
    """What a finished call depended on and what crossed its border; raises `Unfit`.

    `given` are its arguments as they are now, `tensors` leads from nodes to the arguments and attributes they
    stand for, and `kept` are objects that the model holds, as they were when they were first met.
    """
    nodes = notes.order[trial.start :]
    called = _called(trial, notes)
    for objection in (
        *_about_what_ran(trial, nodes, called, notes),
        *_about_arguments(trial, outcome, given),
        *_about_changes(trial, kept),
    ):
        raise Unfit(objection)
    border = _border(nodes, outcome, tensors, notes)
    for objection in _about_memory(nodes, border):
        raise Unfit(objection)
    return _conditions(trial, called), border


def _called(trial: Trial, notes: Notes) -> tuple[nn.Module, ...]:
    scopes = notes.scopes[trial.scope :]
    return tuple({id(scope.module): scope.module for scope in scopes if scope.module is not None}.values())


def _about_what_ran(
    trial: Trial, nodes: Sequence[fx.Node], called: Sequence[nn.Module], notes: Notes
) -> Iterator[str]:
    marks = [notes.marks[node] for node in nodes]
    if len(nodes) < MIN_NODES:
        yield SMALL
    if any(map(has_hooks, called)) or any(mark.hook is not None for mark in marks) or notes.hooks:
        yield "there are hooks on it or inside it"
    if any(mark.phase is Phase.BACKWARD for mark in marks):
        yield "it runs a backward pass"
    if modes_now() != trial.modes:
        yield "it leaves a mode switched"


def _about_arguments(trial: Trial, outcome: Outcome, given: Any) -> Iterator[str]:
    leaves, spec = tree_flatten(given)
    if spec != trial.spec or any(now is not before for now, before in zip(leaves, trial.leaves, strict=True)):
        yield "it changes a container that it was given"
    for leaf in (*leaves, *outcome.leaves):
        if not isinstance(leaf, Tensor) and not is_plain_constant(leaf):
            yield f"it is given or returns a {type(leaf).__name__}"


def _about_changes(trial: Trial, kept: Sequence[Kept]) -> Iterator[str]:
    yield from trial.seen.faults
    for module, before in trial.attributes:
        if not same_items(before, vars(module)):
            yield f"it changes attributes of {type(module).__name__}"
    for read, content in trial.seen.reads.values():
        if content is not None and not same_items(content, read.value):
            yield f"it changes what `{read.name}` holds"
    for thing in kept:
        if not same_items(dict(thing.attributes), vars(thing.module)):
            yield f"it may use a {type(thing.module).__name__} that the model changes"
    lost = trial.variables.close([*(type(module) for module, _ in trial.attributes), *_values(trial.seen)])
    if lost is not None:
        yield f"nobody can say which variables {lost} reads"
    for variable in trial.variables.found.values():
        if not variable.is_unchanged():
            yield f"it changes the variable {variable.name}"


def _values(seen: Seen) -> list[Any]:
    return [read.value for read, _ in seen.reads.values()]


def _border(
    nodes: Sequence[fx.Node], outcome: Outcome, tensors: Mapping[fx.Node, Tensor], notes: Notes
) -> Border:
    inside = set(nodes)
    inputs: dict[fx.Node, Tensor] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and source not in inputs:
                inputs[source] = _tensor_behind(source, tensors, notes)
    pairs = zip(outcome.leaves, outcome.nodes, strict=True)
    outputs = {node: leaf for leaf, node in pairs if node in inside and node is not None}
    known = {id(tensor) for tensor in tensors.values()}
    for leaf, node in zip(outcome.leaves, outcome.nodes, strict=True):
        if isinstance(leaf, Tensor) and node not in inside and id(leaf) not in known:
            raise Unfit("it returns a tensor that comes from outside")
    return Border(tuple(inputs.items()), tuple(outputs.items()))


def _tensor_behind(source: fx.Node, tensors: Mapping[fx.Node, Tensor], notes: Notes) -> Tensor:
    if source in tensors:
        return tensors[source]
    literal = notes.literals.get(source.name)
    if literal is None:
        raise Unfit(f"it uses {source.name}, which is neither an argument nor an attribute")
    if source.name in notes.made:
        raise Unfit("it makes a tensor of numbers")
    return literal


def _about_memory(nodes: Sequence[fx.Node], border: Border) -> Iterator[str]:
    given = {storage_of(node.meta["val"]) for node, _ in border.inputs}
    for node in nodes:
        written = written_arguments(node.target, node.args, node.kwargs) if node.op == "call_function" else []
        if any(storage_of(source.meta["val"]) in given for source in _nodes_in(written)):
            yield "it writes to an argument or to state"
    returned = [storage_of(node.meta["val"]) for node, _ in border.outputs]
    if len(set(returned)) < len(returned) or not given.isdisjoint(returned):
        yield "it returns views of its arguments, or of one another"


def _nodes_in(written: Sequence[Any]) -> Iterator[fx.Node]:
    for value in written:
        yield from value if isinstance(value, list | tuple) else (value,)


def _conditions(trial: Trial, called: tuple[nn.Module, ...]) -> Conditions:
    looks = tuple(_look(read, content) for read, content in trial.seen.reads.values())
    values = [*trial.leaves, *(look.value for look in looks)]
    return Conditions(
        module=trial.module,
        spec=trial.spec,
        leaves=trial.leaves,
        looks=looks,
        variables=tuple(trial.variables.found.values()),
        modes=trial.modes,
        called=called,
        tensors={id(tensor): (tensor, facts_of(tensor)) for tensor in tensors_in(values)},
        holders=frozenset(id(look.holder) for look in looks),
    )


def _look(read: Read, content: Any) -> Look:
    table = place_of(read.holder, read.name)
    if table is not None or not read.is_there:
        return Look(read.holder, read.name, table, read.value, content, read.is_there)
    found = held(read.holder, read.name, None)
    if found is NOTHING:
        return Look(read.holder, read.name, COMPUTED, read.value)
    return Look(read.holder, read.name, None, found)


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among values, also inside lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(list(value.values()))
