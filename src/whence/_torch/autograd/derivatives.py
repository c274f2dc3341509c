"""Where C++ computes otherwise on tensors of a subclass, as those of a recording are to it: eager's way.

Some formulas look at values to find a quicker way, and ask first whether there are any. The recording shows
the way that looks at none, with other last bits. Here eager's is written down, for all values: where it takes
one of several ways both are computed, and a run selects. A derivative that the model takes itself, and may
differentiate in turn, is not reported node by node: there a formula with other last bits is refused.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

from whence._torch.autograd.nodes import nodes_below_tensors
from whence._torch.function_tracer import untold
from whence._torch.patching import patched
from whence._torch.subclasses.wrapper_subclasses import is_composed

if TYPE_CHECKING:
    from whence._torch.record.recorder import Recorder

aten = torch.ops.aten
Produced = Sequence[Tensor | None]


@torch.library.custom_op("whence::sum_selected", mutates_args=())
def _sum_selected(values: Tensor, mask: Tensor, selected: bool) -> Tensor:
    return values.masked_select(mask if selected else ~mask).sum()


@_sum_selected.register_fake
def _shape_of_sum(values: Tensor, mask: Tensor, selected: bool) -> Tensor:  # noqa: ARG001
    return values.new_empty(())


SUM_SELECTED = torch.ops.whence.sum_selected.default
"""The sum of the values where a mask is as wanted. Its last bits depend on how many there are, so that no
operator whose result has a fixed size gives them."""


@dataclass(frozen=True)
class _Ran:
    """What was recorded while an autograd node ran, and what it handed on."""

    recorder: "Recorder"
    operations: Sequence[fx.Node]
    produced: Produced

    def first(self, *targets: Any) -> fx.Node | None:
        return next((node for node in self.operations if node.target in targets), None)

    def last(self, target: Any) -> fx.Node | None:
        return next((node for node in reversed(self.operations) if node.target is target), None)

    def value(self, node: Any) -> Tensor:
        """A tensor for what an operation gave: the one that it gave may be gone, and stays what is shown."""
        shown = dict(node.meta)
        (fresh,) = self.recorder.fresh([shown["val"]])
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            track_tensor_tree(
                fresh, fx.Proxy(node, self.recorder.tracer), constant=None, tracer=self.recorder.tracer
            )
        node.meta |= shown
        return fresh


def as_eager_takes_it(
    recorder: "Recorder", node: Node, recorded: tuple[Sequence[fx.Node], int], produced: Produced
) -> Produced:
    """What an autograd node hands on; from a position in the recording on, it was recorded."""
    rule = _RULES.get(type(node).__name__)
    if rule is None or torch.is_grad_enabled() or any(map(is_composed, produced)):
        return produced
    operations, start = recorded
    return rule(_Ran(recorder, operations[start:], produced))


@contextmanager
def formulas_refused(inside: Callable[[], bool], refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Raise for a derivative that this thread takes `inside` of a model with other last bits than eager's."""
    run, here = torch.autograd._engine_run_backward, threading.get_ident()

    def refuse_other_bits(roots: Any, create: bool) -> None:
        nodes = nodes_below_tensors([root for root in roots if isinstance(root, Tensor)])
        if (found := next((node for node in nodes if _has_other_bits(node, create)), None)) is not None:
            raise refuse(found.name())

    @wraps(run)
    def refusing(roots: Any, gradients: Any, keep: bool, create: bool, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here and inside():
            untold(refuse_other_bits, roots, create)
        return run(roots, gradients, keep, create, *args, **kwargs)

    with patched(torch.autograd, "_engine_run_backward", refusing):
        yield


def _has_other_bits(node: Node, differentiated: bool) -> bool:
    """Whether the recorded way gives other numbers; of an extreme it does for an infinite gradient alone, of
    `cumprod` where it is differentiated again."""
    match type(node).__name__:
        case "CumprodBackward0":
            return differentiated
        case "ProdBackward0" | "ProdBackward1":
            return True
        case "MaskedFillBackward1":
            return node.next_functions[1][0] is not None
    return False


def _of_product(ran: _Ran) -> Produced:
    """`prod`: a division where nothing is 0, nothing where several are."""
    read = ran.first(aten.view.default, aten.clone.default)
    if read is None or not _only_gradient(ran).dim():
        return ran.produced
    given = ran.value(read.args[0])
    zeros = (given == 0).sum()
    careful = torch.where(zeros > 1, 0, _only_gradient(ran))
    return [torch.where(zeros == 0, _divided_derivative(ran, given.prod(), given), careful)]


def _of_product_along(ran: _Ran) -> Produced:
    """`prod` along a dimension: a division where nothing is 0. Of one element the product is that."""
    read = ran.first(aten.slice.Tensor)
    if read is not None:
        given, dim = ran.value(read.args[0]), read.args[1]
        result = given.prod(dim, keepdim=True)  # type: ignore[arg-type]
    elif (saved := ran.last(aten.unsqueeze.default) or ran.last(aten.detach.default)) is not None:
        given = result = ran.value(saved)
    else:
        return ran.produced
    return [torch.where((given == 0).any(), _only_gradient(ran), _divided_derivative(ran, result, given))]


def _divided_derivative(ran: _Ran, result: Tensor, given: Tensor) -> Tensor:
    times = ran.last(aten.mul.Tensor)
    gradient = _only_gradient(ran) if times is None else ran.value(times.args[0])
    return (gradient * (result / given).conj()).to(_only_gradient(ran).dtype)


def _of_extreme(ran: _Ran) -> Produced:
    """`max`, `min` and `median` of everything: zeros, and not what 0 times an infinite gradient gives."""
    times = ran.last(aten.mul.Tensor)
    if times is None:
        return ran.produced
    mask, share = map(ran.value, times.args)
    return [share.new_zeros(mask.shape).masked_fill(mask, share)]


def _of_filled(ran: _Ran) -> Produced:
    """`masked_fill` with a tensor: the gradient of that is a sum of what the mask selects."""
    total, (handed, filling) = ran.last(aten.sum.default), ran.produced
    if total is None or filling is None:
        return ran.produced
    chosen: Any = total.args[0]
    mask, gradient = map(ran.value, chosen.args[:2])
    return [handed, SUM_SELECTED(gradient, mask, True).to(filling.dtype)]


def _only_gradient(ran: _Ran) -> Tensor:
    (gradient,) = ran.produced
    return gradient  # type: ignore[return-value]


_RULES: dict[str, Callable[[_Ran], Produced]] = {
    "ProdBackward0": _of_product,
    "ProdBackward1": _of_product_along,
    "MaxBackward1": _of_extreme,
    "MinBackward1": _of_extreme,
    "MedianBackward0": _of_extreme,
    "NanmedianBackward0": _of_extreme,
    "MaskedFillBackward1": _of_filled,
}
"""By the class of the autograd node."""


def weigh_as_eager(graph: fx.Graph) -> None:
    """The smoothed, weighted cross entropy is divided by the weights of the targets that are not ignored."""
    for total in graph.find_nodes(op="call_function", target=aten.sum.default):
        weights: Any = total.args[0]
        if weights.target is not aten.masked_fill.Scalar or weights.args[0].target is not aten.gather.default:
            continue
        if str(total.meta.get("torch_fn", ("",))[0]).startswith("cross_entropy") and weights.args[2] == 0:
            total.target, total.args = SUM_SELECTED, (*weights.args[:2], False)
