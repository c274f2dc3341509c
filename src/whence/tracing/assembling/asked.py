"""What the model asked of tensors, as questions about its inputs."""

from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import reads_memory, traits
from whence._torch.tensor_questions import asked_unheard
from whence.program import InputQuery, Signature
from whence.program.queries.marks import leading_to
from whence.rewriting.functionalize import Functional
from whence.rewriting.layouts import inputs_behind
from whence.schema import TensorFact
from whence.tracing.log.log import Log, ran_without
from whence.tracing.recording.run import Recorded
from whence.tracing.target.placeholders import Prepared

_DETACH = torch.ops.aten.detach.default
_OF_MEMORY = frozenset({torch.ops.aten.view_as_real.default, torch.ops.aten._conj.default})
"""Operators for which a conjugate lies in memory otherwise than what it is the conjugate of."""
_NORMS = frozenset({torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default})
"""Composites that are taken apart where they train, into kernels that read any layout."""


def asked_of_inputs(
    log: Log, functional: Functional, given: Set[fx.Node], custom: Set[int]
) -> Iterator[tuple[str, TensorFact]]:
    """The placeholders whose strides, history and the like answered what the model asked, and by which.

    `given` are those that a call is given. A custom autograd function asks whether what it is given requires
    a gradient, and made none of the nodes with `custom` numbers where it does not.
    """
    stops = ran_without(log.marks, frozenset())
    stopped = {functional.value_of(node) for node in log.marks if stops(node)}
    for row in dict.fromkeys(log.asked):
        node = functional.value_of(row.node)
        if row.fact is TensorFact.STRIDES:
            yield from ((name, row.fact) for name in inputs_behind(node))
        elif row.fact is TensorFact.STORAGE_OFFSET:
            yield from ((name, row.fact) for name in _in_memory_of(node))
        elif node.op == "placeholder":
            yield node.name, row.fact
        else:
            yield from ((name, TensorFact.REQUIRES_GRAD) for name in _with_history(node, stopped, given))
    for mark in log.marks.values():
        for source in mark.cut if mark.in_function and mark.moment not in custom else ():
            node = functional.value_of(source)
            yield from ((name, TensorFact.REQUIRES_GRAD) for name in _with_history(node, stopped, given))


def differentiated(log: Log, signature: Signature) -> tuple[str, ...]:
    """The state whose gradients the model asks for itself, by name."""
    asked = {row.node.name for row in log.asked if row.fact is TensorFact.HOOKS}
    return tuple(row.path for row in signature.inputs if row.name in asked)


def free_of_layout(recorded: Recorded, functional: Functional, read: Set[str]) -> set[str]:
    """The inputs that a program may take in whatever layout: composites and kernels ask for it in every run.

    Others lead to a value that the model makes contiguous, and that was so at capture. What is below autograd
    has been decided by the layouts of the capture. State whose strides the model has `read`, or that lies
    where it looks into memory, is none of them; arguments are asked in every call.
    """
    log, recorder = recorded.session.log, recorded.session.recorder
    is_decided = recorded.backward.roots or log.apart - _NORMS or not recorder.keeps_composites
    if is_decided or None in log.contiguous:
        return set()
    found = leading_to(functional.value_of(node) for node in log.contiguous if node is not None)
    looks = any(node.op == "call_function" and reads_memory(node.target) for node in recorder.graph.nodes)
    state = () if looks else [node for _, node in recorded.prepared.state if node.name not in read]
    return {node.name for node in (*recorded.prepared.nodes, *state) if node not in found}


def as_given(node: fx.Node, given: Any) -> Any:
    """What stands for an argument, before the model turned its `requires_grad`."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or value.requires_grad == given.requires_grad:
        return value
    return value.detach().requires_grad_(given.requires_grad)


def _in_memory_of(node: fx.Node) -> Iterator[str]:
    """The inputs that a value is a view of."""
    behind = leading_to([node], through=lambda value: traits(value.target).viewed is not None)
    yield from (value.name for value in behind if value.op == "placeholder")


def questions_to_inputs(log: Log, prepared: Prepared, graph: fx.Graph) -> tuple[InputQuery, ...]:
    """What was asked of arguments themselves, each once."""
    unheard = {query.asked: query for query in _asked_unheard(prepared, graph)}
    return tuple((unheard | dict(log.questions)).values())


def _asked_unheard(prepared: Prepared, graph: fx.Graph) -> Iterator[InputQuery]:
    """What code asked arguments past torch functions, and operators of the memory in which they lie."""
    views = any(node.target in _OF_MEMORY for node in graph.nodes)
    for position, (leaf, original) in enumerate(zip(prepared.leaves, prepared.originals, strict=True)):
        yield from (InputQuery(position, *asked, "", None) for asked in asked_unheard(leaf, original))
        if isinstance(original, Tensor) and original.is_complex() and (views or original.is_conj()):
            yield InputQuery(position, "is_conj", original.is_conj(), "", None)


def _with_history(node: fx.Node, stopped: Set[fx.Node], given: Set[fx.Node]) -> Set[str]:
    """The inputs by which a value has a history, or would have one; none where it has one without them."""
    behind = leading_to([node], through=lambda value: _hands_on(value) and value not in stopped)
    inputs = {value for value in behind if value.op == "placeholder" and _hands_on(value)}
    requiring = {value for value in inputs if value.meta["val"].requires_grad}
    found = requiring if requiring <= given else set()
    return {value.name for value in (found if requiring else inputs & given)}


def _hands_on(node: fx.Node) -> bool:
    """Whether a value of this kind may require a gradient."""
    value = node.meta.get("val")
    return (
        node.target is not _DETACH
        and isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
    )
