"""Run the backward of what a model gave, and write the log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node

from whence._torch.autograd.calls_not_run import is_stand_in
from whence._torch.autograd.nodes import (
    gradient_key,
    history_of,
    is_custom_function,
    leads_nowhere,
    leaves_below,
    nodes_below_tensors,
    overwritten,
    run_backward,
)
from whence._torch.observe.checkpoints import is_reentrant_checkpoint
from whence._torch.pytrees import TreeSpec, tree_flatten, tree_unflatten
from whence._torch.record.recorder import Recorder
from whence._torch.refusals import overwritten_before_backward
from whence._torch.subclasses.wrapper_subclasses import carries_gradients, is_composed, plain_parts
from whence.errors import InvalidLoss, Place, SideEffect, UnsupportedInput
from whence.provenance.places import PROGRAM
from whence.schema import Phase
from whence.tracing.attribution.wrapper_subclasses import Composed, gradient_parts, made_otherwise
from whence.tracing.log.log import first_of_each_moment, maker_of
from whence.tracing.recording.gradients_inside import gradients_inside
from whence.tracing.recording.session import Session
from whence.tracing.target.placeholders import Prepared


@dataclass(frozen=True)
class Backward:
    """Which nodes a backward began with, and which hold its gradients.

    `roots` pairs each value that it starts from with its gradient, `tangents` the position of a result with
    the placeholder of its gradient. `gradients` are those of `targets`, placeholders. `structures` are those
    of the gradients of composed tensors, by their paths.
    """

    loss: fx.Node | None = None
    tangents: tuple[tuple[int, fx.Node], ...] = ()
    roots: tuple[tuple[fx.Node, fx.Node], ...] = ()
    targets: tuple[fx.Node, ...] = ()
    gradients: tuple[fx.Node | None, ...] = ()
    structures: Mapping[str, TreeSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class _Wanted:
    """A tensor that requires a gradient, and the placeholders of its plain parts."""

    tensor: Tensor
    nodes: tuple[fx.Node, ...]
    whole: Composed | None = None


@dataclass(frozen=True)
class _Start:
    """A result that the backward starts from, its gradient, and the plain parts of both."""

    tensor: Tensor
    gradient: Tensor
    tangents: tuple[tuple[int, fx.Node], ...]
    roots: tuple[tuple[fx.Node, fx.Node], ...]


def differentiate(
    session: Session, outputs: Sequence[Any], prepared: Prepared, loss: Tensor | None
) -> Backward:
    """The backward of a loss, or of all differentiable outputs; raises `InvalidLoss` where there is none."""
    wanted = _wanted(session, prepared)
    if not wanted:
        raise InvalidLoss(
            "nothing requires a gradient",
            why="no parameter, buffer, input or tensor from outside does",
            remedy="check requires_grad of the parameters, or capture the forward only",
        )
    _refuse_sparse(outputs)
    running = session.run.running
    running.enter_phase(Phase.BACKWARD)
    starts = _starts(session, outputs) if loss is None else [_start_of(session, loss)]
    running.pass_begins([gradient_key(start.tensor) for start in starts])
    outputs, targets = [start.tensor for start in starts], [row.tensor for row in wanted]
    with (
        session.run.places.blaming("the backward"),
        gradients_inside(session.recorder, outputs, targets) as inside,
    ):
        gradients = inside.with_given(_gradients(session, starts, targets))
    return _finished_backward(
        session, starts, wanted, gradients, None if loss is None else session.tensors.known(loss)
    )


def _calls_users_code(session: Session, outputs: Sequence[Tensor]) -> bool:
    """Whether a backward runs functions that somebody wrote: autograd functions, hooks on tensors or on what
    is saved."""
    if session.log.lost or session.run.watch.has_packed:
        return True
    return any(is_custom_function(node) and not is_stand_in(node) for node in nodes_below_tensors(outputs))


def _refuse_sparse(outputs: Sequence[Any]) -> None:
    tensors = (output for output in outputs if isinstance(output, Tensor))
    sparse = [
        output.layout for output in tensors if output.layout is not torch.strided and output.requires_grad
    ]
    if sparse:
        raise UnsupportedInput(
            f"the model returns a {str(sparse[0]).removeprefix('torch.')} tensor that requires a gradient",
            why="that gradient may be sparse or not, and a captured backward would have to know",
            remedy="return it dense, x.to_dense(), or capture the forward only",
        )


def _gradients(
    session: Session, starts: Sequence[_Start], targets: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """What autograd gives. Where sizes vary, its own words about a tensor that was written cannot be made.

    Of leaves that the model made it computes the gradients, too, as eager's does, which nobody reads."""
    outputs = [start.tensor for start in starts]
    known = {*map(id, targets)}
    unread = [leaf for leaf in leaves_made(outputs, session.recorder) if id(leaf) not in known]
    tangents = [start.gradient for start in starts]
    run = partial(run_backward, outputs, [*targets, *unread], tangents, session.passes)
    try:
        found = session.recorder.functions.told(run) if _calls_users_code(session, outputs) else run()
        return found[: len(targets)]
    except RuntimeError as error:
        _refuse_reentrant(outputs, session, error)
        if session.recorder.environment is None:
            raise
        node = overwritten(outputs, (step.node for step in session.log.steps))
        if node is None:
            raise
        raise overwritten_before_backward(node.name(), _made_at(session, node)) from error


def leaves_made(results: Sequence[Tensor], recorder: Recorder) -> list[Tensor]:
    """Leaves that results depend on, or are, and that no input or state of the model is."""
    own = [result for result in results if history_of(result) is None]
    known = ((leaf, recorder.node_of(leaf)) for leaf in (*own, *leaves_below(results)))
    return [leaf for leaf, node in known if node is not None and node.op == "call_function"]


def _refuse_reentrant(outputs: Sequence[Tensor], session: Session, error: RuntimeError) -> None:
    """A checkpoint of the older kind gives no gradients back to whoever asks for them."""
    found = next((node for node in nodes_below_tensors(outputs) if is_reentrant_checkpoint(node)), None)
    if found is not None:
        raise SideEffect(
            "a checkpoint with use_reentrant=True is differentiated",
            where=_made_at(session, found),
            why="it runs a backward inside the backward, which fills .grad and hands nothing on",
            remedy="use torch.utils.checkpoint with use_reentrant=False, which gives the same numbers",
        ) from error


def _made_at(session: Session, node: Node) -> Place:
    """The module and line of the operation that an autograd node differentiates."""
    log = session.log
    maker = maker_of(node, first_of_each_moment(log))
    scope = log.scope_of(node)
    source = None if maker is None else log.marks[maker].source
    return Place(None if scope == PROGRAM else str(log.scopes[scope].site), str(source) if source else None)


def _wanted(session: Session, prepared: Prepared) -> list[_Wanted]:
    """Everything that requires a gradient, in the order of the placeholders; tensors from outside the model,
    such as those that a function closes over, come last."""
    plain = [_Wanted(tensor, (node,)) for tensor, node in prepared.differentiable()]
    composed = [
        _Wanted(whole.tensor, whole.nodes, whole)
        for whole in prepared.wholes
        if gradient_key(whole.tensor) is not None
    ]
    nodes = [*(node for _, node in prepared.state), *prepared.nodes]
    order = {node: at for at, node in reversed([*enumerate(nodes)])}
    outside = [tensor for tensor in session.log.literals.values() if gradient_key(tensor)]
    literals = [_Wanted(tensor, (session.tensors.known(tensor),)) for tensor in outside]
    return [*sorted([*plain, *composed], key=lambda row: order[row.nodes[0]]), *literals]


def _start_of(session: Session, loss: Tensor) -> _Start:
    node = session.tensors.known(loss)
    seed = torch.ones_like(loss, memory_format=torch.preserve_format)
    return _Start(loss, seed, (), ((node, session.tensors.known(seed)),))


def _starts(session: Session, outputs: Sequence[Any]) -> list[_Start]:
    found, at = [], 0
    for output in outputs:
        has_key = isinstance(output, Tensor) and gradient_key(output) is not None
        if has_key and not leads_nowhere(output):
            found.append(_start(session, output, at))
        at += len(list(plain_parts(output)))
    if not found:
        raise InvalidLoss(
            "no output requires a gradient",
            why="backward=True asks for the gradients of the outputs",
            remedy="check requires_grad of the parameters, no_grad blocks and .detach() calls",
        )
    return found


def _start(session: Session, output: Tensor, at: int) -> _Start:
    parts, spec = tree_flatten(output)
    if not all(map(carries_gradients, parts)):
        raise UnsupportedInput(
            f"the model returns a {type(output).__name__} that requires a gradient and holds whole numbers",
            why="its gradient arrives in the parts that it is made of, and whole numbers have none",
            remedy="return what it stands for as a plain tensor",
        )
    fakes = [session.recorder.tangent(part, f"tangent_{position}") for position, part in enumerate(parts, at)]
    nodes = [node for _, node in fakes]
    values = [session.tensors.known(part) for part in parts]
    gradient = tree_unflatten([fake for fake, _ in fakes], spec)
    return _Start(output, gradient, tuple(enumerate(nodes, at)), tuple(zip(values, nodes, strict=True)))


def _finished_backward(
    session: Session,
    starts: Sequence[_Start],
    wanted: Sequence[_Wanted],
    gradients: Sequence[Tensor | None],
    loss: fx.Node | None,
) -> Backward:
    found: list[Tensor | None] = []
    structures: dict[str, TreeSpec] = {}
    for row, gradient in zip(wanted, gradients, strict=True):
        if row.whole is None:
            if is_composed(gradient):
                raise made_otherwise(
                    session.log.inputs.get(row.nodes[0], row.nodes[0].name), row.tensor, gradient
                )
            found.append(gradient)
            continue
        spec, parts = gradient_parts(row.whole, gradient)
        found += parts
        structures |= {row.whole.path: spec} if spec is not None else {}
    return Backward(
        loss=loss,
        tangents=tuple(pair for start in starts for pair in start.tangents),
        roots=tuple(pair for start in starts for pair in start.roots),
        targets=tuple(node for row in wanted for node in row.nodes),
        gradients=tuple(None if gradient is None else session.tensors.known(gradient) for gradient in found),
        structures=structures,
    )
