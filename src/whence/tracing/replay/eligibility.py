"""May what a watched call recorded stand for other calls?"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn

from whence._torch.autograd.calls_not_run import is_stand_in
from whence._torch.autograd.nodes import derivative_of_its_own, made_since
from whence._torch.autograd.switches import modes_now
from whence._torch.observe.attribute_reads import NOTHING
from whence._torch.observe.hooks import has_hooks
from whence._torch.operators.composites import count_of
from whence._torch.operators.schemas import written_nodes
from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.nodes import bases_of
from whence._torch.sizes.symbols import SYMBOLIC, shape_env_version
from whence._torch.tensors import attributes_set_on, storage_of
from whence.dependence.object_graph import ReachedThing, parts_of
from whence.dependence.observed import Read
from whence.dependence.snapshots import CONTAINERS, Saved, same_items
from whence.dependence.tensor_facts import all_facts_of, first_difference
from whence.rewriting.aliases import memory_of
from whence.schema import Phase
from whence.tracing.listening.recording import Recording
from whence.tracing.log.log import Log
from whence.tracing.replay.records.likeness import COMPUTED, Conditions, Look, held, place_of
from whence.tracing.replay.records.watched_call import (
    MIN_OPERATORS,
    SMALL,
    Border,
    Outcome,
    ReadsSeen,
    Unfit,
    WatchedCall,
)
from whence.tracing.sandbox.module_snapshot import ModuleCopy
from whence.tracing.target.example import is_plain_constant

_METHODS = (
    FunctionType,
    BuiltinFunctionType,
    classmethod,
    staticmethod,
    property,
    MethodDescriptorType,
    MethodType,
)


def attempted(
    trial: WatchedCall, outcome: Outcome, recording: Recording, *, differentiates: bool
) -> tuple[Conditions, Border]:
    """What a finished call depended on and what crossed its border; raises `Unfit`.

    `differentiates` says whether the capture records the backward, too.
    """
    log = recording.log
    nodes, called = log.order[trial.start.position :], _modules_called(trial, log)
    for objection in chain(
        _about_what_ran(trial, nodes, called, log, differentiates=differentiates),
        _about_functions(trial, outcome, differentiates=differentiates),
        _about_arguments(trial, outcome),
        _about_changes(trial, recording.run.reads.kept),
        _about_variables(trial),
    ):
        raise Unfit(objection)
    border = _border(nodes, outcome, _tensors_behind(trial, recording), recording)
    for objection in chain(_about_memory(nodes, border, recording), _about_sizes(trial, outcome, recording)):
        raise Unfit(objection)
    return _conditions(trial, called), border


def _tensors_behind(trial: WatchedCall, recording: Recording) -> dict[fx.Node, Tensor]:
    """The arguments and attributes that nodes stand for."""
    read = tensors_in([read.value for read, _ in trial.seen.reads.values()])
    found = {node: tensor for tensor in read if (node := recording.recorder.node_of(tensor)) is not None}
    given = zip(trial.nodes, trial.given.leaves, strict=True)
    return found | {node: leaf for node, leaf in given if node is not None}


def _modules_called(trial: WatchedCall, log: Log) -> tuple[nn.Module, ...]:
    scopes = log.scopes[trial.scope :]
    return tuple({id(scope.module): scope.module for scope in scopes if scope.module is not None}.values())


def _about_what_ran(
    trial: WatchedCall,
    nodes: Sequence[fx.Node],
    called: Sequence[nn.Module],
    log: Log,
    *,
    differentiates: bool,
) -> Iterator[str]:
    marks = [log.marks[node] for node in nodes]
    if sum(map(count_of, nodes)) < MIN_OPERATORS:
        yield SMALL
    if any(map(has_hooks, called)) or any(mark.hook is not None for mark in marks) or log.lost:
        yield "there are hooks on it or inside it"
    if any(mark.phase is Phase.BACKWARD for mark in marks):
        yield "it runs a backward pass"
    if modes_now() != trial.modes:
        yield "it leaves a mode switched"
    if not differentiates and any(mark.cut for mark in marks):
        yield "a part of it runs without gradients"
    if not differentiates and _writes_past_autograd(nodes):
        yield "it writes to what has a history through a tensor that has none"


def _writes_past_autograd(nodes: Sequence[fx.Node]) -> bool:
    detached = {_memory_shared(node) for node in nodes if node.target is torch.ops.aten.detach.default}
    return bool(detached) and any(
        _memory_shared(written) in detached for node in nodes for written in written_nodes(node)
    )


def _about_functions(trial: WatchedCall, outcome: Outcome, *, differentiates: bool) -> Iterator[str]:
    """The backward of a custom function is Python code that nobody watches."""
    tensors = [leaf for leaf in outcome.leaves if isinstance(leaf, Tensor)] if differentiates else []
    made = made_since(trial.start.moment, tensors)
    if any(derivative_of_its_own(node) and not is_stand_in(node) for node in made):
        yield "a custom autograd function runs inside it"


def _about_arguments(trial: WatchedCall, outcome: Outcome) -> Iterator[str]:
    given = trial.given
    leaves, spec = tree_flatten((given.args, given.kwargs))
    returned = list(containers_in(outcome.result))
    if spec != given.spec or not all(map(is_, leaves, given.leaves)):
        yield "it changes a container that it was given"
    for leaf in (*leaves, *outcome.leaves):
        if isinstance(leaf, Tensor):
            if attributes_set_on(leaf) and id(leaf) not in trial.seen.tensors:
                yield "it sets attributes on a tensor"
        elif not is_plain_constant(leaf) and not isinstance(leaf, SYMBOLIC):
            yield f"it is given or returns a {type(leaf).__name__}"
    known = {id(container) for container in containers_in((given.args, given.kwargs, _values(trial.seen)))}
    if any(id(container) in known or container in trial.variables.reached for container in returned):
        yield "it returns a container that it does not make"


def _about_changes(trial: WatchedCall, kept: Sequence[ModuleCopy]) -> Iterator[str]:
    yield from trial.seen.faults
    for module, before in trial.attributes:
        if not same_items(before, vars(module)):
            yield f"it changes attributes of {type(module).__name__}"
    for read, contents in trial.seen.reads.values():
        if not all(content.is_unchanged for content in contents):
            yield f"it changes what `{read.name}` holds"
    for tensor, facts in trial.seen.tensors.values():
        if all_facts_of(tensor) != facts:
            yield f"it changes a tensor: {first_difference(facts, all_facts_of(tensor))}"
    for slots in trial.seen.slotted.values():
        if not slots.is_unchanged:
            yield f"it changes a {type(slots.thing).__name__}"
    for thing in kept:
        if not same_items(thing.attributes, vars(thing.module)):
            yield f"it may use a {type(thing.module).__name__} that the model changes"


def _about_variables(trial: WatchedCall) -> Iterator[str]:
    if trial.caller is not None and trial.variables.ran(trial.caller):
        yield "it runs the function that calls it"
    yield from trial.variables.doubtful(
        [*(type(module) for module, _ in trial.attributes), *_values(trial.seen)]
    )


def _values(seen: ReadsSeen) -> list[Any]:
    return [read.value for read, _ in seen.reads.values()]


def _border(
    nodes: Sequence[fx.Node], outcome: Outcome, tensors: Mapping[fx.Node, Tensor], recording: Recording
) -> Border:
    inside, sizes = set(nodes), bases_of(recording.recorder.sizes)
    inputs: dict[fx.Node, Tensor] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and source not in inputs and source not in sizes:
                inputs[source] = _tensor_behind(source, tensors, recording.log)
    known, outputs = {id(tensor) for tensor in tensors.values()}, dict[fx.Node, Tensor]()
    for leaf, made in zip(outcome.leaves, outcome.nodes, strict=True):
        if made is not None and made in inside:
            outputs[made] = leaf
        elif isinstance(leaf, Tensor) and id(leaf) not in known:
            raise Unfit("it returns a tensor that comes from outside")
    return Border(tuple(inputs.items()), tuple(outputs.items()))


def _tensor_behind(source: fx.Node, tensors: Mapping[fx.Node, Tensor], log: Log) -> Tensor:
    if source in tensors:
        return tensors[source]
    literal = log.literals.get(source.name)
    if literal is None:
        raise Unfit(f"it uses {source.name}, which is neither an argument nor an attribute")
    if source.name in log.made:
        raise Unfit("it makes a tensor of numbers")
    return literal


def _about_memory(nodes: Sequence[fx.Node], border: Border, recording: Recording) -> Iterator[str]:
    memory = _memory_shared if recording.recorder.environment is None else memory_of(nodes)
    given = {memory(node) for node, _ in border.inputs}
    for node in nodes:
        if any(memory(source) in given for source in written_nodes(node)):
            yield "it writes to an argument or to state"
    returned = [memory(node) for node, _ in border.outputs]
    if len(set(returned)) < len(returned) or not given.isdisjoint(returned):
        yield "it returns views of its arguments, or of one another"


def _memory_shared(node: fx.Node) -> object:
    """What tensors share that look into one memory."""
    return storage_of(node.meta["val"])


def _about_sizes(trial: WatchedCall, outcome: Outcome, recording: Recording) -> Iterator[str]:
    if any(isinstance(leaf, SYMBOLIC) for leaf in outcome.leaves):
        yield "it returns a size"
    if shape_env_version(recording.recorder.environment) != trial.start.sizes_known:
        yield "it finds out something about a size, or makes one"


def _conditions(trial: WatchedCall, called: tuple[nn.Module, ...]) -> Conditions:
    looks = tuple(_look(read, contents) for read, contents in trial.seen.reads.values())
    values = [*trial.given.leaves, *(look.value for look in looks)]
    return Conditions(
        module=trial.module,
        spec=trial.given.spec,
        leaves=trial.given.leaves,
        looks=looks,
        outside=trial.variables.outside(),
        modes=trial.modes,
        called=called,
        tensors={id(tensor): (tensor, all_facts_of(tensor)) for tensor in tensors_in(values)}
        | trial.seen.tensors,
        holders=frozenset(id(look.holder) for look in looks),
        inside=frozenset(id(module) for module, _ in trial.attributes),
        computing=tuple(
            {
                id(look.holder): _thing_reached(look.holder) for look in looks if look.table == COMPUTED
            }.values()
        ),
    )


def _thing_reached(holder: object) -> ReachedThing:
    return ReachedThing(holder, parts_of(holder))


def _look(read: Read, contents: Sequence[Saved]) -> Look:
    table = place_of(read.holder, read.name)
    if table is not None or not read.is_there:
        return Look(read.holder, read.name, table, read.value, tuple(contents), read.is_there)
    found = held(read.holder, read.name, None)
    if found is NOTHING:
        return Look(read.holder, read.name, COMPUTED, read.value)
    if hasattr(type(found), "__get__") and not isinstance(found, _METHODS):
        raise Unfit(f"`{read.name}` is looked up by a {type(found).__name__}")
    return Look(read.holder, read.name, None, found)


def containers_in(value: Any) -> Iterator[Any]:
    """The containers in a value, itself among them, that somebody could change."""
    if isinstance(value, CONTAINERS):
        yield value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from containers_in(item)


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among values, also inside lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(list(value.values()))
