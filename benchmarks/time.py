"""How long capture, unflatten and the captured modules take."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

import whence
from benchmarks.measuring import Result, batch, in_a_row, llama, seconds, side_by_side

LAYERS = 32


def forward_capture() -> Result:
    """Forward capture against `torch.export.export(strict=False)`."""
    _warm()
    model, inputs = llama(LAYERS), batch()
    theirs = seconds(lambda: torch.export.export(model, (), inputs, strict=False))
    ours = seconds(lambda: whence.capture(model, (), inputs))
    return Result("forward capture, Llama 32 layers, against torch.export", ours, theirs, 1.0, "s")


class _WithLoss(nn.Module):
    """The official road differentiates the outputs of a module, so the loss must be one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """The loss only."""
        return (self.model(**inputs).loss,)


def _official_joint(model: nn.Module, inputs: dict[str, Any]) -> None:
    graph_module = dynamo_graph_capture_for_export(_WithLoss(model))(**inputs)
    with ExitStack() as stack:
        aot_export_joint_with_descriptors(stack, graph_module, (), inputs)


def joint_capture() -> Result:
    """Joint capture against Dynamo capture for export followed by AOT joint export."""
    _warm()
    model = llama(LAYERS)
    inputs = {**batch(), "labels": batch()["input_ids"]}
    theirs = seconds(partial(_official_joint, model, inputs))
    ours = seconds(lambda: whence.capture(model, (), inputs, backward=lambda outputs: outputs.loss))
    return Result("joint capture, Llama 32 layers, against Dynamo + AOT joint", ours, theirs, 0.45, "s")


def unflatten() -> Result:
    """Unflatten of a forward program against `torch.export.unflatten`."""
    model, inputs = llama(LAYERS), batch()
    exported = torch.export.export(model, (), inputs, strict=False)
    program = whence.capture(model, (), inputs)
    theirs = seconds(lambda: torch.export.unflatten(exported))
    ours = seconds(program.unflatten)
    return Result("unflatten, Llama 32 layers, against torch.export.unflatten", ours, theirs, 0.125, "s")


def tree_forward() -> Result:
    """The forward of an unflattened 4-layer Llama against eager."""
    model, inputs = llama(4).eval(), batch()
    tree = whence.capture(model, (), inputs).unflatten()
    ours, theirs = side_by_side(partial(tree, **inputs), partial(model, **inputs))
    return Result("forward of the tree, Llama 4 layers, against eager", 1e3 * ours, 1e3 * theirs, 1.05, "ms")


def flat_forward() -> Result:
    """The forward of the flat module of a 4-layer Llama against eager."""
    model, inputs = llama(4).eval(), batch()
    flat = whence.capture(model, (), inputs).module()
    ours, theirs = side_by_side(partial(flat, **inputs), partial(model, **inputs))
    return Result(
        "forward of the flat module, Llama 4 layers, against eager", 1e3 * ours, 1e3 * theirs, 1.05, "ms"
    )


def training_step() -> Result:
    """Forward and backward of an unflattened training step against eager."""
    model = llama(4).eval()
    inputs = {**batch(), "labels": batch()["input_ids"]}
    tree = whence.capture(model, (), inputs, backward=lambda outputs: outputs.loss).unflatten()

    def ours_step() -> None:
        tree(**inputs)[0].backward()

    def eager_step() -> None:
        model(**inputs).loss.backward()

    ours, theirs = side_by_side(ours_step, eager_step)
    return Result(
        "training step of the tree, Llama 4 layers, against eager", 1e3 * ours, 1e3 * theirs, 1.1, "ms"
    )


def guard_check() -> Result:
    """A check of all guards, model and inputs, against an eager forward: each repeated by itself."""
    program, model, inputs = _guarded()
    with torch.no_grad():
        theirs = in_a_row(partial(model, **inputs), 51)
        ours = in_a_row(lambda: program.check(model, (), inputs), 201)
    name = "check of all guards, Llama 32 layers, against an eager forward"
    return Result(name, 1e3 * ours, 1e3 * theirs, 0.03, "ms")


def guard_check_between() -> Result:
    """The same in turns with forwards, each of which leaves the caches filled with weights."""
    program, model, inputs = _guarded()
    with torch.no_grad():
        check = partial(program.check, model, (), inputs)
        ours, theirs = side_by_side(check, partial(model, **inputs), 51)
    name = "check of all guards between forwards, Llama 32 layers, against the forward"
    return Result(name, 1e3 * ours, 1e3 * theirs, 0.05, "ms")


def _guarded() -> tuple[whence.Program, nn.Module, dict[str, Any]]:
    model, inputs = llama(LAYERS).eval(), batch()
    with torch.no_grad():
        return whence.capture(model, (), inputs), model, inputs


def _warm() -> None:
    """Both roads load much on their first use."""
    model = llama(2)
    inputs = {**batch(), "labels": batch()["input_ids"]}
    torch.export.export(model, (), batch(), strict=False)
    _official_joint(model, inputs)
    whence.capture(model, (), inputs, backward=lambda outputs: outputs.loss)


BENCHMARKS: dict[str, Callable[[], Result]] = {
    "forward-capture": forward_capture,
    "joint-capture": joint_capture,
    "unflatten": unflatten,
    "tree-forward": tree_forward,
    "flat-forward": flat_forward,
    "training-step": training_step,
    "guard-check": guard_check,
    "guard-check-between": guard_check_between,
}
