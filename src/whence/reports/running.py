"""Run a model, or the program captured from it, once, and note everything that can be compared."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.compiling import compiled_functions_run_eagerly, compiling_on_this_thread
from whence._torch.sharding import local_part, sharding_kept, whole
from whence._torch.tensors import untouched
from whence._torch.trees import tree_flatten, tree_unflatten
from whence.hierarchy.run import attribute_of
from whence.program import Program
from whence.provenance import ModulePath
from whence.schema import InputKind, OutputKind
from whence.tracing.modules import modules_restored
from whence.tracing.subject import Subject, state_tensors

SEED = 20


@dataclass(frozen=True)
class Run:
    """What one run gave and changed, by name."""

    outputs: dict[str, Any]
    gradients: dict[str, Any]
    state: dict[str, Tensor]
    inputs: dict[str, Any]
    generator: Tensor


@contextmanager
def same_start(subject: Subject, inputs: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The same seed, state and inputs for every run; afterwards everything is as it was before.

    Gives copies of the inputs. The model's own tensors are used, and written back.
    """
    modules = list(subject.named_modules())
    tensors = [row.tensor for row in state_tensors(subject)]
    before = [(tensor, tensor.detach().clone(), tensor.grad, tensor.requires_grad) for tensor in tensors]
    python, cpu = random.getstate(), torch.get_rng_state()
    with untouched(tensors):
        try:
            with modules_restored(modules), sharding_kept(module for _, module in modules):
                for tensor in tensors:
                    tensor.grad = None
                random.seed(SEED)
                torch.manual_seed(SEED)
                yield _copied(inputs)
        finally:
            random.setstate(python)
            torch.set_rng_state(cpu)
            for tensor, value, gradient, required in before:
                tensor.requires_grad_(required)
                tensor.grad = gradient
                _write_back(tensor, value)


def _write_back(tensor: Tensor, value: Tensor) -> None:
    if tensor.is_meta or torch.equal(local_part(tensor), local_part(value)):
        return
    with torch.no_grad():
        tensor.copy_(value)


def _copied(inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    leaves, spec = tree_flatten(inputs)
    copies: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    args, kwargs = tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], spec)
    return args, kwargs


def run_eager(program: Program, subject: Subject, args: Any, kwargs: Any, *, told: bool = False) -> Run:
    """The model as it is; with `told`, it is told that it is being compiled."""
    asked = compiling_on_this_thread(lambda: False) if told else nullcontext()
    with asked, compiled_functions_run_eagerly():
        result = subject.call(*args, **kwargs)
        loss = None if program.loss_function is None else program.loss_function(result)
    tensors = {str(path): row.tensor for row in state_tensors(subject) for path in row.paths}
    return _finish(program, (args, kwargs), result, loss, tensors)


def run_module(module: nn.Module, program: Program, args: Any, kwargs: Any) -> Run:
    """The captured program as a module."""
    result, loss = module(*args, **kwargs), None
    if program.signature.outputs_of(OutputKind.LOSS):
        loss, result = result
    held = {path: attribute_of(module, ModulePath.parse(path)) for path in _paths(program)}
    return _finish(program, (args, kwargs), result, loss, held)


def _paths(program: Program) -> list[str]:
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    return [path for row in program.signature.state if row.kind in kinds for path in (row.path, *row.aliases)]


def _finish(
    program: Program, inputs: tuple[Any, Any], result: Any, loss: Tensor | None, tensors: dict[str, Tensor]
) -> Run:
    leaves, _ = tree_flatten(result)
    differentiated = loss is not None or not program.opaque
    if differentiated:
        _differentiate(leaves, loss)
    given, _ = tree_flatten(inputs)
    arguments = [
        (path, leaf) for path, leaf in zip(program.convention.paths, given, strict=True) if _is(leaf)
    ]
    names = [row.name for row in program.signature.outputs_of(OutputKind.USER)]
    outputs = {} if loss is None else {"loss": loss.detach()}
    wanted = [
        (name, tensor)
        for name, tensor in (*tensors.items(), *arguments)
        if differentiated and tensor.requires_grad and tensor.is_leaf
    ]
    return Run(
        outputs=outputs
        | {n: leaf.detach().clone() if _is(leaf) else leaf for n, leaf in zip(names, leaves, strict=False)},
        gradients={
            name: None if tensor.grad is None else whole(tensor.grad).clone() for name, tensor in wanted
        },
        state={name: whole(tensor.detach()).clone() for name, tensor in tensors.items()},
        inputs={path: leaf.detach().clone() for path, leaf in arguments},
        generator=torch.get_rng_state(),
    )


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _differentiate(leaves: Sequence[Any], loss: Tensor | None) -> None:
    """The same backward pass for both: from the loss, or from fixed random gradients of the outputs."""
    if loss is not None:
        loss.backward()
        return
    roots = [leaf for leaf in leaves if _is(leaf) and leaf.requires_grad]
    if not roots:
        return
    generator = torch.Generator().manual_seed(SEED)
    drawn = [torch.randn(root.shape, generator=generator, dtype=torch.float32) for root in roots]
    tangents = [torch.empty_like(root).copy_(numbers) for root, numbers in zip(roots, drawn, strict=True)]
    torch.autograd.backward(roots, tangents)
