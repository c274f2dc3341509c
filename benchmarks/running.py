"""Captured modules at work, and the check of their guards, beside eager."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from benchmarks.models import batch, labelled, llama, loss
from benchmarks.results import Figures, Sample
from benchmarks.timing import compared_short, in_a_row
from whence.guards import Guarded


def tree_forward(layers: int, repeats: int) -> Figures:
    """The forward of the module tree, recorded by autograd as in training."""
    model, inputs = llama(layers).eval(), batch()
    tree = whence.capture(model, (), inputs).unflatten()
    return compared_short(partial(tree, **inputs), partial(model, **inputs), repeats)


def flat_forward(layers: int, repeats: int) -> Figures:
    """The same of the flat module."""
    model, inputs = llama(layers).eval(), batch()
    flat = whence.capture(model, (), inputs).module()
    return compared_short(partial(flat, **inputs), partial(model, **inputs), repeats)


def training_step(layers: int, repeats: int) -> Figures:
    """Forward and backward of the module tree."""
    model, inputs = llama(layers).eval(), labelled(batch())
    tree = whence.capture(model, (), inputs, backward=loss).unflatten()

    def ours() -> None:
        tree(**inputs)[0].backward()

    def eager() -> None:
        model(**inputs).loss.backward()

    return compared_short(ours, eager, repeats)


def guard_check(layers: int) -> Figures:
    """What a guarded program does before a call, against an eager forward: each repeated by itself."""
    guarded, model, inputs = _guarded(layers)
    with torch.no_grad():
        theirs = in_a_row(partial(model, **inputs), 51)
        ours = in_a_row(partial(guarded.check, (), inputs), 201)
    return Figures(ours, theirs, "ms")


def guard_check_between(layers: int) -> Figures:
    """The same in turns with forwards, each of which leaves the caches filled with weights."""
    guarded, model, inputs = _guarded(layers)
    with torch.no_grad():
        return compared_short(partial(guarded.check, (), inputs), partial(model, **inputs), 51)


def guard_check_anew(layers: int) -> Figures:
    """`program.check`, which remembers nothing of the model: guard by guard."""
    model, inputs = llama(layers).eval(), batch()
    with torch.no_grad():
        program = whence.capture(model, (), inputs)
        return compared_short(partial(program.check, model, (), inputs), partial(model, **inputs), 51)


class _Sum(nn.Module):
    def forward(self, *tensors: Tensor) -> Any:
        return sum(tensor.sum() for tensor in tensors)


def check_of_sizes(count: int) -> Figures:
    """A check of so many inputs with two sizes each that may vary: microseconds for one of them."""
    model, inputs = _Sum(), tuple(torch.zeros(4, 8) for _ in range(count))
    batches, length = Dim("batch"), Dim("length", max=512)
    shapes = (tuple({0: batches, 1: length} for _ in inputs),)
    program = whence.capture(model, inputs, dynamic_shapes=shapes)
    times = in_a_row(partial(program.check, model, inputs), 201)
    each = Sample(times.median * 1000 / count, times.repeats)
    return Figures(each, None, "µs", f"{count} inputs, two sizes each")


def _guarded(layers: int) -> tuple[Guarded, nn.Module, dict[str, Any]]:
    model, inputs = llama(layers).eval(), batch()
    with torch.no_grad():
        return whence.capture(model, (), inputs).guarded(model), model, inputs
