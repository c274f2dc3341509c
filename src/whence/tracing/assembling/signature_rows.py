"""The rows of the signature."""

from collections.abc import Container, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

from torch import Tensor, fx

from whence._torch.pytrees import key_segments, spelled, tree_flatten_with_path, tree_unflatten
from whence._torch.sizes.numbers import is_recorded
from whence._torch.subclasses.wrapper_subclasses import is_composed, plain_parts
from whence.program import Input, Output, Part, Signature, Whole
from whence.program.calls import Deferred
from whence.program.names import state_name
from whence.schema import InputKind, OutputKind, TensorFact
from whence.tracing.attribution.wrapper_subclasses import Composed
from whence.tracing.log.log import UNNAMED
from whence.tracing.recording.run import Recorded
from whence.tracing.target.example import Example
from whence.tracing.target.loss_state import LossTensor
from whence.tracing.target.subject import (
    StateTensor,
    Subject,
    attribute_names,
    loose_tensors,
    tensors_by_name,
)


@dataclass(frozen=True)
class GraphValues:
    """The nodes that hold, in the functional graph, what the run returned, wrote and differentiated."""

    loss: fx.Node | None
    results: tuple[fx.Node | None, ...]
    written: Mapping[fx.Node, fx.Node]
    gradients: tuple[fx.Node | None, ...]
    kept: tuple[fx.Node, ...] = ()


def inputs_present(
    signature: Signature, present: Container[str], asked: Set[tuple[str, TensorFact]]
) -> Iterator[Input]:
    """The rows of inputs that are present, with whether their layout is read."""
    for row in signature.inputs:
        if row.name in present:
            yield replace(row, layout_read=True) if (row.name, TensorFact.STRIDES) in asked else row


def signature_of(
    subject: Subject, example: Example, recorded: Recorded, values: GraphValues
) -> tuple[Signature, list[Any]]:
    """All rows, and the values of the output node in the same order."""
    state = [_state_row(row, node) for row, node in recorded.prepared.state]
    constants = list(_constant_rows(subject, recorded))
    user = [
        Input(node.name, InputKind.USER, path, value=node.meta["val"], part=part)
        for node, path, part in zip(recorded.prepared.nodes, example.paths, example.parts, strict=True)
    ]
    results = list(_result_rows(recorded, values))
    names = [row.name for row, _ in results]
    tangents = [
        Input(
            node.name,
            InputKind.TANGENT,
            results[i][0].path,
            of=names[i],
            value=node.meta["val"],
            part=results[i][0].part,
        )
        for i, node in recorded.backward.tangents
    ]
    inputs = (*state, *(row for row, _ in recorded.rows), *constants, *user, *tangents)
    by_name = {row.name: row for row in inputs}
    outputs = [
        *_loss_rows(values),
        *results,
        *_mutation_rows(values, by_name),
        *_gradient_rows(recorded, values, by_name),
        *_kept_rows(recorded, values),
    ]
    return Signature(inputs, tuple(row for row, _ in outputs)), [value for _, value in outputs]


def _state_row(row: StateTensor, node: fx.Node) -> Input:
    first, *others = row.paths
    whole = row.whole or row
    return Input(
        name=node.name,
        kind=row.kind,
        path=str(first),
        aliases=tuple(map(str, others)),
        module=whole.paths[0].parent,
        module_type=row.owner,
        value=node.meta["val"],
        persistent=row.persistent,
        part=_part(row),
    )


def _part(row: StateTensor) -> Part | None:
    if row.whole is None:
        return None
    whole = row.whole.tensor
    path, access = str(row.whole.paths[0]), ".".join(row.access)
    return Part.of(path, whole, access, requires_grad=bool(whole.requires_grad))


def _constant_rows(subject: Subject, recorded: Recorded) -> Iterator[Input]:
    named = attribute_names(subject)
    nodes = {node.name: node for node in recorded.session.recorder.graph.nodes if node.op == "placeholder"}
    parts = {
        id(tensor): Part.of(str(path), value, ".".join(access))
        for path, value in loose_tensors(subject)
        for access, tensor in plain_parts(value)
        if access
    }
    of_loss = recorded.session.log.of_loss
    for name, tensor in recorded.session.log.literals.items():
        held = of_loss.get(id(tensor))
        if held is not None and not name.startswith(UNNAMED):
            yield _loss_row(name, held, nodes[name])
            continue
        path, owner = named.get(id(tensor), (None, None))
        yield Input(
            name=name,
            kind=InputKind.CONSTANT,
            path=str(path) if path else _free_path(name.removeprefix("c_"), subject),
            module=path.parent if path else None,
            module_type=owner,
            value=nodes[name].meta["val"],
            part=parts.get(id(tensor)),
        )


def _free_path(wanted: str, subject: Subject) -> str:
    """A path for a tensor that nobody has a name for, which no tensor of the model has."""
    taken = tensors_by_name(subject)
    paths = chain([wanted], (f"{wanted}_{number}" for number in count(1)))
    return next(path for path in paths if path not in taken)


def _loss_row(name: str, held: LossTensor, node: fx.Node) -> Input:
    first, *others = held.paths
    return Input(
        name=name,
        kind=held.kind,
        path=str(first),
        aliases=tuple(map(str, others)),
        module=first.parent,
        module_type=held.owner,
        value=node.meta["val"],
    )


def _loss_rows(values: GraphValues) -> Iterator[tuple[Output, Any]]:
    if values.loss is not None:
        yield Output("loss", OutputKind.LOSS, "loss", node=values.loss.name), values.loss


def _result_rows(recorded: Recorded, values: GraphValues) -> Iterator[tuple[Output, Any]]:
    pairs, _ = tree_flatten_with_path(
        tree_unflatten(list(range(len(recorded.results))), recorded.result_spec)
    )
    for (path, position), leaf in zip(pairs, recorded.results, strict=True):
        node = values.results[position]
        name = "_".join(["output", *key_segments(path)])
        constant = None if isinstance(leaf, Tensor | Deferred) or is_recorded(leaf) else leaf
        held = None if node is None else node.name
        yield (
            Output(
                name,
                OutputKind.USER,
                f"output{spelled(path)}",
                node=held,
                value=constant,
                part=recorded.result_parts[position],
            ),
            (constant if node is None else node),
        )


def _mutation_rows(values: GraphValues, inputs: Mapping[str, Input]) -> Iterator[tuple[Output, Any]]:
    for placeholder, value in values.written.items():
        changed = inputs[placeholder.name]
        yield (
            Output(
                f"new_{changed.name}",
                OutputKind.MUTATION,
                changed.path,
                of=changed.name,
                node=value.name,
                part=changed.part,
            ),
            value,
        )


def _gradient_rows(
    recorded: Recorded, values: GraphValues, inputs: Mapping[str, Input]
) -> Iterator[tuple[Output, Any]]:
    for placeholder, value in zip(recorded.backward.targets, values.gradients, strict=True):
        source = inputs[placeholder.name]
        held = None if value is None else value.name
        yield (
            Output(
                f"grad_{source.name}",
                OutputKind.GRADIENT,
                source.path,
                of=source.name,
                node=held,
                part=source.part,
            ),
            value,
        )


def _kept_rows(recorded: Recorded, values: GraphValues) -> Iterator[tuple[Output, Any]]:
    for kept, value in zip(recorded.kept, values.kept, strict=True):
        yield Output(kept.name, OutputKind.EFFECT, kept.path, node=value.name), value


def wholes_of(subject: Subject, recorded: Recorded) -> tuple[Whole, ...]:
    """The tensors that are made of several inputs: parameters, buffers, arguments, attributes."""
    state = {id(row.tensor): row for row in subject.state} if recorded.prepared.wholes else {}
    found = [_whole(whole, state, recorded) for whole in recorded.prepared.wholes]
    literals = {id(tensor): name for name, tensor in recorded.session.log.literals.items()}
    for path, value in loose_tensors(subject):
        names = [literals[id(tensor)] for _, tensor in plain_parts(value) if id(tensor) in literals]
        if is_composed(value) and names:
            found.append(Whole(state_name(InputKind.CONSTANT, path), str(path), tuple(names), value))
    return tuple(found)


def _whole(whole: Composed, state: Mapping[int, StateTensor], recorded: Recorded) -> Whole:
    parts = tuple(node.name for node in whole.nodes)
    gradient = recorded.backward.structures.get(whole.path)
    row = state.get(id(whole.tensor))
    if row is None:
        return Whole(whole.path, whole.path, parts, gradient=gradient)
    aliases = tuple(map(str, row.paths[1:]))
    return Whole(state_name(row.kind, row.paths[0]), whole.path, parts, whole.tensor, gradient, aliases)
