"""Captured modules at work, and the check of their guards, beside eager."""

from functools import partial
from typing import Any

import torch
from torch import nn

import whence
from benchmarks.models import batch, labelled, llama, loss
from benchmarks.results import Figures
from benchmarks.timing import compared_short, in_a_row


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
    """A check of all guards, model and inputs, against an eager forward: each repeated by itself."""
    program, model, inputs = _guarded(layers)
    with torch.no_grad():
        theirs = in_a_row(partial(model, **inputs), 51)
        ours = in_a_row(partial(program.check, model, (), inputs), 201)
    return Figures(ours, theirs, "ms")


def guard_check_between(layers: int) -> Figures:
    """The same in turns with forwards, each of which leaves the caches filled with weights."""
    program, model, inputs = _guarded(layers)
    with torch.no_grad():
        return compared_short(partial(program.check, model, (), inputs), partial(model, **inputs), 51)


def _guarded(layers: int) -> tuple[whence.Program, nn.Module, dict[str, Any]]:
    model, inputs = llama(layers).eval(), batch()
    with torch.no_grad():
        return whence.capture(model, (), inputs), model, inputs
