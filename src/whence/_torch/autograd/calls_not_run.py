"""Let autograd go through a call that was not run."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from whence._torch.autograd.nodes import node_class_of
from whence._torch.function_tracer import untold

Calls = tuple[tuple[int, ...], ...]
"""Of each gradient the calls that it comes from."""
Backward = Callable[[Sequence[Tensor | None]], tuple[Sequence[Tensor | None], Calls]]


class _Replayed(torch.autograd.Function):
    """Results that somebody else has made, and gradients that somebody else makes."""

    @staticmethod
    def forward(ctx: Any, results: list[Tensor], kept: list[bool], backward: Backward, *_: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t, keeps in zip(results, kept, strict=True) if not keeps))
        ctx.gradients, ctx.calls = backward, None
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        gradients, ctx.calls = untold(ctx.gradients, tangents)
        return (None, None, None, *gradients)


def linked(
    results: list[Tensor], differentiable: list[bool], sources: Sequence[Tensor], backward: Backward
) -> list[Tensor]:
    """`results` as functions of `sources`; `backward` makes one gradient for each source."""
    if not is_grad_enabled() or not any(differentiable):
        return results
    linked: list[Tensor] = list(_Replayed.apply(results, differentiable, backward, *sources))
    return linked


def is_stand_in(node: torch.autograd.graph.Node) -> bool:
    """Whether a node of autograd stands for those of a call that was not run."""
    return isinstance(node, node_class_of(_Replayed))


def calls_behind(node: torch.autograd.graph.Node) -> Calls | None:
    """The calls that each gradient which a stand-in has made comes from; None for other nodes."""
    return node.calls if is_stand_in(node) else None  # type: ignore[attr-defined]
