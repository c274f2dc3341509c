"""Capture and unflatten, beside PyTorch's own road."""

from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.export import Dim

import whence
from benchmarks.models import batch, labelled, llama, loss
from benchmarks.results import Figures
from benchmarks.timing import Repeats, compared


def forward(layers: int, repeats: Repeats) -> Figures:
    """Forward capture against `torch.export.export(strict=False)`."""
    _warm()
    model = llama(layers)
    return compared(partial(whence.capture, model, (), batch()), partial(_export, model), repeats)


def dynamic(layers: int, repeats: Repeats) -> Figures:
    """Forward capture with a sequence length that may vary, against PyTorch's with the same."""
    _warm()
    model = llama(layers)
    shapes = {"input_ids": {1: Dim("length", min=2, max=1024)}, "use_cache": None}
    export = partial(torch.export.export, model, (), batch(), dynamic_shapes=shapes, strict=False)
    return compared(partial(whence.capture, model, (), batch(), dynamic_shapes=shapes), export, repeats)


def varying(layers: int, repeats: Repeats, *, differentiated: bool, reuse: bool) -> Figures:
    """A capture with a batch and a length that may vary, against one of fixed sizes."""
    _warm()
    model, inputs = llama(layers), labelled(batch()) if differentiated else batch()
    free = {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=1024)}
    shapes = {name: free if isinstance(value, torch.Tensor) else None for name, value in inputs.items()}
    fixed = partial(whence.capture, model, (), inputs, backward=differentiated and loss, reuse=reuse)
    return compared(partial(fixed, dynamic_shapes=shapes), fixed, repeats)


def joint(layers: int, repeats: Repeats) -> Figures:
    """Joint capture against Dynamo's capture for export followed by AOT's joint export."""
    _warm()
    model, inputs = llama(layers), labelled(batch())
    return compared(partial(joint_program, model, inputs), partial(_official_joint, model, inputs), repeats)


def unflatten(layers: int, repeats: Repeats) -> Figures:
    """Unflatten of a forward program against PyTorch's; neither compiles anything before it runs."""
    _warm()
    model = llama(layers)
    exported, program = _export(model), whence.capture(model, (), batch())
    return compared(program.unflatten, partial(torch.export.unflatten, exported), repeats)


def joint_program(model: nn.Module, inputs: dict[str, Any]) -> whence.Program:
    """Forward and backward of the loss."""
    return whence.capture(model, (), inputs, backward=loss)


def _export(model: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(model, (), batch(), strict=False)


class _WithLoss(nn.Module):
    """The official road differentiates the outputs of a module, so the loss must be one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """The loss only."""
        return (self.model(**inputs).loss,)


def _official_joint(model: nn.Module, inputs: dict[str, Any]) -> Any:
    graph_module = dynamo_graph_capture_for_export(_WithLoss(model))(**inputs)
    with ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, graph_module, (), inputs)


@cache
def _warm() -> None:
    """Both roads load much on their first use."""
    model, inputs = llama(2), labelled(batch())
    torch.export.unflatten(_export(model))
    _official_joint(model, inputs)
    joint_program(model, inputs).unflatten()
