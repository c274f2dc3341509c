"""Watch autograd run: which of its nodes is executing, and what it hands on.

`torch.autograd.graph.Node` is public; its sequence numbers and the current counter are not. They are what
ties a node of the backward graph to the moment of the forward pass that made it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled
from torch.autograd.graph import Node

from whence._torch.function_tracer import untold
from whence._torch.tensors import storage_of

LEAF_SEQUENCE_NUMBER = 2**64 - 1
_SCRIPTED = "DifferentiableGraphBackward"

GradientKey = tuple[int, ...]
"""Where the gradient of a tensor is collected: a node and an input of it, or a leaf tensor and -1.

For a tensor that is made of others, the number of its part follows.

Made of identities, so it holds only while the node or tensor is kept alive.
"""


class BackwardListener(Protocol):
    """What is told while a backward pass runs; `reported` are the nodes that it is told of now, by id."""

    @property
    def reported(self) -> set[int]: ...

    def node_starts(self, node: Node, received: Sequence[Tensor | None]) -> None:
        """`node` is about to run on the gradients of its outputs."""

    def node_ends(self, node: Node, produced: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """`node` has run; `produced` are the gradients along its outgoing edges, in order. Returns what is
        handed on instead, which may be the same."""


def next_sequence_number() -> int:
    """The number that the next autograd node made on this thread will carry."""
    return torch._C._autograd._get_sequence_nr()


def sequence_number(node: Node) -> int | None:
    """When `node` was made; None for leaves, which carry no moment."""
    number = node._sequence_nr()
    return None if number == LEAF_SEQUENCE_NUMBER else number


def gradient_key(tensor: Tensor) -> GradientKey | None:
    """Where the gradient of `tensor` is collected; None when it needs none."""
    with torch._C.DisableTorchFunction():
        if not tensor.requires_grad:
            return None
        history = tensor.grad_fn
        return (id(tensor), -1) if history is None else (id(history), tensor.output_nr)


def leads_nowhere(tensor: Tensor) -> bool:
    """Whether it is a view made under `no_grad`: it says that it requires a gradient, and can have none."""
    with torch._C.DisableTorchFunction():
        return tensor.grad_fn is None and tensor._base is not None and tensor._base.requires_grad


def keys_out(node: Node) -> list[GradientKey | None]:
    """Where the gradients that `node` produces go, in order; None where nothing needs one."""
    return [None if target is None else _key(target, index) for target, index in node.next_functions]


def _key(target: Node, index: int) -> GradientKey:
    return (id(target.variable), -1) if is_leaf_node(target) else (id(target), index)  # type: ignore[attr-defined]


def history_of(tensor: Tensor) -> Node | None:
    """The autograd node that made `tensor`."""
    with torch._C.DisableTorchFunction():
        return tensor.grad_fn


def node_class_of(function: type[torch.autograd.Function]) -> type:
    """The class of the autograd nodes that a custom function makes."""
    return function._backward_cls


def inside_custom_function() -> bool:
    """Whether the forward of a custom autograd function is running: what it calls records nothing.

    `apply` turns forward-mode gradients off, too, as `no_grad` does not, nor inference mode while modes are
    observed (`observed_grad_modes`).
    """
    return not (is_grad_enabled() or torch._C._is_fwd_grad_enabled())


def inside_backward() -> bool:
    """Whether autograd's engine is running on this thread."""
    return _run_now() != -1


def _run_now() -> int:
    """Which run of autograd's engine is on."""
    return torch._C._current_graph_task_id()


def is_custom_function(node: Node) -> bool:
    """Whether `node` is the backward of a `torch.autograd.Function` written in Python."""
    return isinstance(node, torch._C._FunctionBase)


def derivative_of_its_own(node: Node) -> str:
    """Who differentiates what `node` stands for by code that no graph contains; "" for an operator.

    TorchScript does where it has optimized a function, which it does once that has run twice with gradients.
    """
    if is_custom_function(node):
        return f"the custom autograd function {node.name().removesuffix('Backward')}"
    return "TorchScript, of a function that it has optimized" if node.name().endswith(_SCRIPTED) else ""


def nodes_below(roots: Sequence[Node], since: int = 0) -> list[Node]:
    """Every node reachable from `roots` if it was made `since` that moment."""
    seen = {id(root): root for root in roots}
    waiting = list(seen.values())
    while waiting:
        for target, _ in waiting.pop().next_functions:
            if target is not None and id(target) not in seen and target._sequence_nr() >= since:
                seen[id(target)] = target
                waiting.append(target)
    return list(seen.values())


def nodes_below_tensors(tensors: Sequence[Tensor]) -> list[Node]:
    """Every node that leads to `tensors`."""
    return nodes_below(_histories(tensors))


def overwritten(outputs: Sequence[Tensor], ran: Iterable[Node]) -> Node | None:
    """An autograd node that leads to `outputs` and whose saved tensors somebody has written in place since.

    Those that `ran` have let go of theirs.
    """
    gone = {id(node) for node in ran}
    nodes = (node for node in nodes_below_tensors(outputs) if id(node) not in gone)
    return next((node for node in nodes if _has_lost(node)), None)


def saves_its_result(result: Tensor) -> bool:
    """Whether the node that made a tensor needs it for its own derivative, as that of `exp` does."""
    node = result.grad_fn
    saved = [getattr(node, name, None) for name in dir(node) if name.startswith("_saved_")]
    return any(isinstance(each, Tensor) and storage_of(each) == storage_of(result) for each in saved)


def _has_lost(node: Node) -> bool:
    try:
        for name in dir(node):
            if name.startswith("_saved_"):
                getattr(node, name)
    except RuntimeError:
        return True
    return False


def made_since(moment: int, results: Sequence[Tensor]) -> list[Node]:
    """The nodes that lead to `results` and were made since that moment."""
    roots = [node for node in _histories(results) if node._sequence_nr() >= moment]
    return nodes_below(roots, moment)


def is_leaf_node(node: Node) -> bool:
    """Whether `node` collects the gradient of a leaf tensor."""
    return hasattr(node, "variable")


@contextmanager
def watched(nodes: Sequence[Node], listener: BackwardListener) -> Iterator[None]:
    """Report to `listener` when each of `nodes` starts and ends, once where a backward runs in another."""
    with ExitStack() as hooks:
        for node in nodes:
            if is_leaf_node(node) or id(node) in listener.reported:
                continue
            listener.reported.add(id(node))
            hooks.callback(listener.reported.remove, id(node))
            hooks.callback(node.register_prehook(_before(node, listener)).remove)
            hooks.callback(node.register_hook(_after(node, listener)).remove)
        yield


def _before(node: Node, listener: BackwardListener) -> Any:
    def starts(received: Sequence[Tensor | None]) -> None:
        untold(listener.node_starts, node, received)

    return starts


def _after(node: Node, listener: BackwardListener) -> Any:
    def ends(
        produced: Sequence[Tensor | None], _received: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...] | None:
        instead = untold(listener.node_ends, node, produced)
        return None if instead is produced else tuple(instead)

    return ends


def run_backward(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    listener: BackwardListener,
) -> tuple[Tensor | None, ...]:
    """Gradients of `outputs` for `inputs`, run on the calling thread and reported node by node."""
    nodes = nodes_below_tensors(outputs)
    with torch.autograd.set_multithreading_enabled(False), watched(nodes, listener):
        return torch.autograd.grad(outputs, inputs, tangents, allow_unused=True)


def leaves_below(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The leaf tensors that gradients of these would be collected for."""
    return [node.variable for node in nodes_below_tensors(tensors) if is_leaf_node(node)]  # type: ignore[attr-defined]


def leaves_of(function: type[torch.autograd.Function], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The leaf tensors that a custom function was given on the way to `tensors`."""
    kind = node_class_of(function)
    nodes = (node for node in nodes_below_tensors(tensors) if isinstance(node, kind))
    targets = (target for node in nodes for target, _ in node.next_functions)
    return [node.variable for node in targets if node is not None and is_leaf_node(node)]  # type: ignore[attr-defined]


def as_given(tensor: Tensor) -> Tensor:
    """The tensor as the result of an operation that autograd recorded, with memory in common.

    Of leaves autocast keeps the casts, and nobody may write to them.
    """
    leaf = tensor.detach().requires_grad_()
    plain = type(leaf) is Tensor and leaf.layout is torch.strided
    if not plain or leaf.is_conj() or leaf.is_neg():
        return leaf
    return _Given.apply(leaf)  # type: ignore[no-any-return]


class _Given(torch.autograd.Function):
    """Gives a tensor that looks into the memory of another, and is no view to autograd."""

    @staticmethod
    def forward(_ctx: Any, leaf: Tensor) -> Tensor:
        """Without the gradient that a view would have."""
        found: Any = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return found.set_(leaf.detach())  # type: ignore[no-any-return]

    @staticmethod
    def backward(_ctx: Any, received: Tensor) -> Tensor:
        return received


def gradients_in_pieces(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor], *, retain_graph: bool
) -> list[tuple[Tensor, ...]]:
    """Gradients of `outputs` for `inputs`, each as what arrived for it, in the order of arrival."""
    keys = [gradient_key(tensor) for tensor in inputs]
    pieces: dict[GradientKey | None, list[Tensor]] = {key: [] for key in keys}
    for output, tangent in zip(outputs, tangents, strict=True):
        pieces.get(gradient_key(output), []).append(tangent)
    with ExitStack() as hooks:
        for node in nodes_below_tensors(outputs):
            places = [key if key in pieces else None for key in keys_out(node)]
            if any(key is not None for key in places):
                hooks.callback(node.register_hook(_collecting(node, places, pieces)).remove)
        totals = torch.autograd.grad(outputs, inputs, tangents, allow_unused=True, retain_graph=retain_graph)
    return [() if total is None else tuple(pieces[key]) for key, total in zip(keys, totals, strict=True)]


def _collecting(
    node: Node, places: Sequence[GradientKey | None], pieces: Mapping[GradientKey | None, list[Tensor]]
) -> Any:
    """A function of Python's may hand on sums, and say in `parts` what each of them was made of."""

    def ends(produced: Sequence[Tensor | None], _received: Sequence[Tensor | None]) -> None:
        made_of = vars(node).pop("parts", {}) if is_custom_function(node) else {}
        for position, (key, gradient) in enumerate(zip(places, produced, strict=True)):
            if key is not None and gradient is not None:
                pieces[key] += made_of.get(position, (gradient,))

    return ends


def run_part_of_backward(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tangents: Sequence[Tensor],
    listener: BackwardListener,
    since: int,
) -> None:
    """Run the nodes between `outputs` and `inputs` that were made `since` a moment; they can run again."""
    nodes, run = nodes_below(roots := _histories(outputs), since), list[int]()
    before = [
        target
        for node in nodes
        for target, _ in node.next_functions
        if target is not None and target._sequence_nr() < since
    ]
    with ExitStack() as active:
        active.enter_context(torch.autograd.set_multithreading_enabled(False))
        active.enter_context(watched(nodes, listener))
        for root in roots:
            active.callback(root.register_prehook(lambda _: run.append(_run_now())).remove)
        for node in {id(node): node for node in before}.values():
            active.callback(node.register_prehook(partial(_stop, run)).remove)
        with suppress(_Stopped):
            torch.autograd.grad(outputs, inputs, tangents, retain_graph=True, allow_unused=True)


class _Stopped(Exception):
    """A backward has come to where it should end."""


def _stop(run: Sequence[int], _received: object) -> None:
    """Nodes run in the reverse order of their making: all that were made since then have run. A run inside of
    this one, of what was made before, goes on."""
    if run[0] == _run_now():
        raise _Stopped


def _histories(tensors: Sequence[Tensor]) -> list[Node]:
    return [node for tensor in tensors if (node := history_of(tensor)) is not None]


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run operations as autograd runs them: recording nothing, with grad mode on.

    Some kernels look at grad mode to decide what to keep for their backward (oneDNN's LSTM does), so
    `no_grad` would change what they return. The contexts of `torch` would say that the model turned it on.
    """
    before = is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        torch._C._set_grad_enabled(before)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Run operations as under `no_grad` where inference mode is on: to what they compute it is no other.

    Views that C++ makes there of tensors from outside must have a version counter, which a fake tensor made
    in inference mode cannot have. The contexts of `torch` would say that the model had left its modes.
    """
    if not is_inference_mode_enabled():
        yield
        return
    forward_mode = torch._C._is_fwd_grad_enabled()
    with (
        torch._C._InferenceMode(False),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C.DisableTorchFunction(),
    ):
        torch._C._set_grad_enabled(False)
        torch._C._set_fwd_grad_enabled(forward_mode)
        yield


def release_saved(context: Any) -> None:
    """Let go of what a `torch.autograd.Function` saved, as autograd's own nodes do once they have run.

    Nothing happens while the graph is retained. The method is there for AOTAutograd, and is not documented:
    without it everything saved lives until the whole backward of the function is over.
    """
    context.maybe_clear_saved_tensors()


@contextmanager
def above_autograd(*, tracking_views: bool = True) -> Iterator[None]:
    """Record operations again, inside `below_autograd`; a result is noted as a view if that is tracked."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        if tracking_views or key != torch._C.DispatchKey.ADInplaceOrView:
            exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


_AUTOGRAD_KEYS = tuple(
    key
    for name, key in torch._C.DispatchKey.__members__.items()
    if name == "ADInplaceOrView" or (name.startswith("Autograd") and name != "AutogradFunctionality")
)


def keeps_graph() -> bool:
    """Whether the backward that is running was asked to keep its graph."""
    return inside_backward() and torch._C._autograd._get_current_graph_task_keep_graph()
