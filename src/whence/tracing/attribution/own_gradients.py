"""Gradients as nodes of their own.

Another module may take the place of a preserved call, also in a captured backward. The gradients that it
hands to what is around it are its own then, so each is a value of the call. And a newcomer may return what it
was given: what led to its result reaches its argument then, between other gradients, in the order of arrival.
So a gradient that is handed on as it came, as a residual does it, to a value that modules exchange or to a
leaf gets a node that does nothing, made when it arrives.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from whence._torch.autograd.nodes import GradientKey
from whence._torch.record.recorder import Recorder
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.tracing.log.log import Log


def as_own_nodes(
    recorder: Recorder,
    log: Log,
    keys: Sequence[GradientKey | None],
    start: int,
    produced: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:
    """What an autograd node hands on to the places `keys`; `start` is where its operations begin."""
    new, edges = set(log.order[start:]), zip(keys, produced, strict=True)
    return [
        _own(recorder, gradient, new) if _is_told_apart(log, key) else gradient for key, gradient in edges
    ]


def _is_told_apart(log: Log, key: GradientKey | None) -> bool:
    return key is not None and (key in log.exchanged or key[1] < 0)


def _own(recorder: Recorder, gradient: Tensor | None, new: set[fx.Node]) -> Tensor | None:
    """A gradient as a node that nothing else stands for: each of the `new` ones is taken once."""
    if gradient is None or is_composed(gradient) or (made := recorder.node_of(gradient)) is None:
        return gradient
    if made not in new:
        again: Tensor = torch.ops.aten.alias.default(gradient)
        return again
    new.remove(made)
    return gradient
