"""Run a captured call under autograd: its captured forward, and later its captured backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from whence._torch.autograd.nodes import below_autograd, release_saved
from whence._torch.sizes.exported_sizes import in_order_of
from whence._torch.tensors import count_writes, is_tracked_view
from whence.errors import NotDifferentiable
from whence.hierarchy.plan.plan import CallPlan, Half
from whence.hierarchy.run.gradient_pieces import Piece, added, in_order, pieces_in
from whence.hierarchy.run.interface import GradientInterface
from whence.hierarchy.run.wrapper_subclasses import holding, registered_at
from whence.hierarchy.swap.newcomers import SwapTrial
from whence.hierarchy.swap.refusal import Refusal
from whence.hierarchy.value_shapes import TensorDescription
from whence.program.queries.failing import OF_OPERATIONS, refuse_failed, refuse_misfits
from whence.provenance import ModulePath

if TYPE_CHECKING:
    from whence.hierarchy.emit.calls import CallBody

Needs = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Differentiation:
    """One differentiable run: which halves to run, on which module, and how gradients are wired.

    `watched` is the state that the backward reads from the module. `half` is the backward that runs, and
    `new` are the parameters of modules that took the place of captured ones, without those `tied` to captured
    parameters, by the names of these.
    """

    runner: "CallBody"
    module: nn.Module
    plan: CallPlan
    gradients: GradientInterface
    watched: tuple[tuple[ModulePath, Tensor], ...]
    half: Half = Half.BACKWARD
    new: tuple[Tensor, ...] = ()
    tied: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors that autograd sees going in: parameters, then the inputs of the body."""
        return (*(name for name, _ in self.gradients.parameters), *self.plan.forward.inputs)

    def taken(self, tensors: Iterable[Any]) -> list[Any]:
        """These tensors as autograd takes them: what no gradient is for comes without its history, through
        which a backward would go on, though that may be over already (a buffer that the call makes anew)."""
        terms, tied = self.gradients.terms, self.tied
        return [
            held.detach()
            if isinstance(held, Tensor) and held.grad_fn and not (terms.get(name) or name in tied)
            else held
            for name, held in zip(self.inputs, tensors, strict=True)
        ]


class CapturedFunction(torch.autograd.Function):
    """A captured call as one node of autograd's graph: the outputs of a body over parameters and values."""

    @staticmethod
    def forward(ctx: Any, run: Differentiation, *tensors: Any) -> tuple[Any, ...]:
        """Run the forward and keep what the backward needs."""
        count = len(run.gradients.parameters)
        with below_autograd():
            results = run.runner.run_forward(run.module, *tensors[count : len(run.inputs)])
        kept = ()
        if run.plan.forward.kept:
            *outputs, kept = results
            results = tuple(outputs)
        leaves, ctx.layout = _flattened_pack(kept)
        ctx.save_for_backward(*leaves, *(held for _, held in run.watched))
        ctx.run = run
        ctx.edges = [*accumulate((isinstance(tensor, Tensor) for tensor in tensors), initial=0)]
        named = list(zip(run.plan.forward.outputs, results, strict=True))
        again = {name for name, _, _ in run.gradients.rewritten}
        ctx.between = {name: value for name, value in named if name in again} if again else {}
        given = zip(run.inputs, tensors, strict=False)  # which may be results, too
        ctx.shapes = {name: value.shape for name, value in (*given, *named) if isinstance(value, Tensor)}
        ctx.set_materialize_grads(False)
        differentiable = {name for name, _ in run.gradients.tangents}
        ctx.mark_non_differentiable(
            *(r for name, r in named if name not in differentiable and isinstance(r, Tensor))
        )
        return results

    @staticmethod
    def backward(ctx: Any, *received: Tensor | None) -> tuple[Any, ...]:
        """Run the captured backward on the gradients that arrived; it cannot be differentiated again."""
        with torch.no_grad():
            try:
                gradients = CapturedFunction._gradients(ctx, received)
                given = zip(ctx.run.inputs, gradients, strict=False)
                shapes = ((name, held, ctx.shapes.get(name)) for name, held in given)
                refuse_misfits(ctx.run.runner.plan.program, shapes)
            except OF_OPERATIONS as error:
                refuse_failed(ctx.run.runner.plan.program, error)
                raise
        return (None, *(map(_final, gradients) if torch.is_grad_enabled() else gradients))

    @staticmethod
    def _gradients(ctx: Any, received: Sequence[Tensor | None]) -> list[Tensor | None]:
        run: Differentiation = ctx.run
        body = run.plan.backward
        if body is None or run.gradients.refusal:
            raise NotDifferentiable(
                "this module cannot be differentiated alone",
                why=run.gradients.refusal,
                remedy="call the whole tree",
            )
        arrived, missing = _tangents_received(run, received, ctx.shapes)
        _refuse_rewriting(run, ctx.between, missing)
        tangents = [arrived[name] for name in body.inputs]
        kept, others = _kept_by_forward(ctx, run)
        with holding(run.module, others) if others else nullcontext():
            produced = run.runner.run_backward(run.module, run.half, *kept, *tangents)
        values = {**arrived, **dict(zip(body.outputs, produced, strict=True))}
        for _, name, path in run.gradients.rewritten:
            registered_at(run.module, path).copy_(values[name])
        needs = run.runner.needs if missing else {}
        given = zip(run.inputs, ctx.needs_input_grad[1:], strict=False)  # no parameter, where a module went
        found = _found_by_trials(ctx.layout) if run.half is Half.IN_PIECES else {}
        tied = {name: found.get(id(held), ()) for name, held in run.tied.items()}
        parts = [
            _arriving_terms(run, name, values, (missing, needs), tied.get(name, ())) if has else ()
            for name, has in given
        ]
        parts += [in_order(found.get(id(held), ())) for held in run.new]
        ctx.parts = {edge: part for edge, part in zip(ctx.edges, parts, strict=False) if len(part) > 1}
        return [*map(added, parts)]


def _refuse_rewriting(run: Differentiation, between: Mapping[str, Tensor], missing: Set[str]) -> None:
    """Raise `NotDifferentiable` where others have written, since the forward, state that is written again:
    eager goes on from what is there, and the captured backward from what the forward left."""
    moved = [
        str(path)
        for name, _, path in run.gradients.rewritten
        if not torch.equal(registered_at(run.module, path), between[name])
    ]
    if moved:
        why = f"a checkpoint writes {', '.join(moved)} again, which has changed since the forward"
    elif missing and run.gradients.rewritten:
        why = "a checkpoint writes state again where its gradient is asked for, and that of a result was not"
    else:
        return
    raise NotDifferentiable(
        "this module cannot be differentiated here",
        why=why,
        remedy="take the backward of every result after each forward, before the next one; or capture the "
        "training step (whence.capture_step)",
    )


def _kept_by_forward(ctx: Any, run: Differentiation) -> tuple[list[Any], dict[ModulePath, Tensor]]:
    """What the forward kept, as the backward takes it: it empties the lists, and so frees what it has used.

    Looking at the saved tensors also checks that none was changed since, the watched state among them. That
    which the module holds no more comes second, as after `torch.func.functional_call`.
    """
    saved = iter(ctx.saved_tensors)
    kept = [_packed(ctx.layout, saved)] if run.plan.forward.kept else []
    watched = [(path, held) for (path, _), held in zip(run.watched, saved, strict=True)]
    release_saved(ctx)
    return kept, {path: held for path, held in watched if _is_another(run.module, path, held)}


def _is_another(module: nn.Module, path: ModulePath, held: Tensor) -> bool:
    now = registered_at(module, path)
    return now is not None and now is not held  # of a module that was replaced, its backward will tell


def laid_out(tensor: Tensor, expected: TensorDescription) -> Tensor:
    """A tensor in the memory layout that the capture saw."""
    if any(type(size) is not int for size in (*expected.shape, *expected.strides)):
        return in_order_of(tensor, expected.shape, expected.strides)
    if tensor.layout != torch.strided or tensor.stride() == expected.strides:
        return tensor
    steps = [row for row in zip(*expected.layout, tensor.stride(), strict=True) if row[0] > 1]
    if any(not wanted for _, wanted, _ in steps) or all(wanted == found for _, wanted, found in steps):
        return tensor  # it overlaps, or lies as it should: where a size is 1, no step is taken
    copied = torch.empty_strided(*expected.layout, dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor)


def _final(gradient: Tensor | None) -> Tensor | None:
    """A gradient asked for with `create_graph=True`: it raises when somebody differentiates it."""
    if gradient is None:
        return None
    reason = "the captured backward was recorded once, and its own derivative was not"
    (final,) = Refusal.apply(reason, gradient.detach().requires_grad_())
    return final  # type: ignore[no-any-return]


def _tangents_received(
    run: Differentiation, received: Sequence[Tensor | None], shapes: Mapping[str, torch.Size]
) -> tuple[dict[str, Tensor], set[str]]:
    """The gradients by the names the backward knows them by; zeros for those that did not arrive.

    A value returned twice is one tensor, so its gradients arrive as one sum: the first name takes it.
    """
    waiting = dict(zip(run.plan.forward.outputs, received, strict=True))
    device = next((gradient.device for gradient in received if gradient is not None), None)
    arrived: dict[str, Tensor] = {}
    missing: set[str] = set()
    for output, tangent in run.gradients.tangents:
        gradient = waiting.pop(output, None)
        if gradient is None:
            missing.add(tangent)
            dtype = run.runner.plan.nodes[tangent].meta["val"].dtype
            gradient = torch.zeros(shapes[output], dtype=dtype, device=device)
        arrived[tangent] = gradient
    return arrived, missing


def _arriving_terms(
    run: Differentiation,
    name: str,
    values: dict[str, Any],
    unused: tuple[set[str], Needs],
    more: Sequence[Piece],
) -> tuple[Tensor, ...]:
    """The terms of a gradient, and `more`; none where all terms come from gradients that did not arrive."""
    terms, (missing, needs) = run.gradients.terms.get(name, ()), unused
    if missing and terms and all(needs.get(term, frozenset()) <= missing for term in terms):
        terms = ()
    if run.half is Half.BACKWARD:
        return tuple(values[term] for term in terms)
    found = ((values[term], term) for term in terms)  # None for a parameter whose module was replaced
    parts = (pieces_in(value, run.runner.plan.positions[term]) for value, term in found if value is not None)
    return in_order(chain(*parts, more))


def _found_by_trials(layout: Any) -> dict[int, list[Piece]]:
    """The gradients that other people's modules found for their parameters, by the identity of these."""
    found: dict[int, list[Piece]] = {}
    for trial in _trials(layout):
        for parameter, pieces in trial.take():
            found.setdefault(id(parameter), []).extend(pieces)
    return found


def _trials(layout: Any) -> Iterator[SwapTrial]:
    if isinstance(layout, SwapTrial):
        yield layout
    for part in layout if isinstance(layout, tuple) else ():
        yield from _trials(part)


def _flattened_pack(pack: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a nested tuple, and its layout with their positions."""
    leaves: list[Tensor] = []
    return leaves, _with_slots(pack, leaves)


def _with_slots(part: Any, leaves: list[Tensor]) -> Any:
    """A part of what is kept, with slots in the place of tensors, which go to `leaves`."""
    if isinstance(part, tuple):
        return tuple(_with_slots(item, leaves) for item in part)
    if isinstance(part, Tensor):
        leaves.append(part)
        return _KeptSlot
    return part


class _KeptSlot:
    """Stands for a tensor in the layout of what was kept."""


def _packed(layout: Any, leaves: Iterator[Tensor]) -> Any:
    if isinstance(layout, tuple):
        return [_packed(item, leaves) for item in layout]
    return next(leaves) if layout is _KeptSlot else layout


def straight_through(operation: Callable[..., Tensor], tensor: Tensor, *rest: Any, **options: Any) -> Tensor:
    """`operation(tensor, …)`, with the gradient of the result handed to `tensor` unchanged.

    In eager it is written, and where autograd has kept it a backward says so.
    """
    with torch.no_grad():
        value = operation(tensor, *rest, **options)
    if not tensor.requires_grad:
        return value
    if not (torch.compiler.is_compiling() or tensor.is_leaf or is_tracked_view(tensor)):
        count_writes([tensor])
    return _StraightThrough.apply(value, tensor)  # type: ignore[no-any-return]


def put_behind(_copy: Callable[..., Tensor], tensor: Tensor, value: Tensor, **_: Any) -> Tensor:
    """The tensor itself, with other numbers that autograd does not hear of: it finds them in what it kept."""
    tensor.data.copy_(value)
    return tensor


def with_gradients(operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`operation(…)` where the model itself had turned gradients on, whatever its caller says."""
    with torch.enable_grad():
        return operation(*args, **options)


def without_gradients(operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`operation(…)`, which asks for the grad mode, where the model itself had turned gradients off."""
    with torch.no_grad():
        return operation(*args, **options)


class _StraightThrough(torch.autograd.Function):
    """The number of one tensor with the history of another."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor, _tensor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_ctx: Any, received: Tensor) -> Any:
        return None, received
