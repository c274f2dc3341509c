"""What the tests of this folder compare, and how."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import whence


def equal(left: Any, right: Any) -> bool:
    """Whether two pytrees have one structure, equal bits in every tensor and equal constants."""
    ours, spec = pytree.tree_flatten(left)
    theirs, other = pytree.tree_flatten(right)
    return spec == other and all(map(_equal_leaves, ours, theirs))


def _equal_leaves(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def gradients(module: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor | None]:
    """The gradient of every parameter, by name, after the backward of `loss()`; `.grad` is left empty."""
    module.zero_grad()
    loss().backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def operations(graph: fx.Graph) -> list[str]:
    """The operations of a graph, in order, without the unpacking of tuples."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [target for target in called if "getitem" not in target]


def names(program: whence.Program, kind: str) -> list[str]:
    """The names of the inputs of one kind, in order."""
    return [row.name for row in program.signature.inputs if row.kind == kind]


def call_sites(program: whence.Program) -> list[str]:
    """Every module call, in order: `layer`, `layer@1`; the root is the empty text."""
    return [str(call.site) for call in program.calls]


def call_targets(graph: fx.Graph | None) -> list[str]:
    """What the calls of a graph in the tree say they call, in order."""
    if graph is None:
        return []
    return [str(node.target) for node in graph.nodes if node.op == "call_module"]


def faithful(
    model: nn.Module, *args: Any, backward: bool | Callable[[Any], Tensor] = True, **kwargs: Any
) -> whence.Program:
    """The program of a model; it, its flat module and its tree give the same bits as eager."""
    program = whence.capture(model, args, kwargs, backward=backward)
    result = program.verify(model, args, kwargs)
    assert result.ok, str(result)
    for make in (program.module, program.unflatten):
        torch.manual_seed(0)
        expected = deepcopy(model)(*args, **kwargs)
        torch.manual_seed(0)
        assert equal(make(copy=True)(*args, **kwargs), expected)
    return program


def hooks(program: whence.Program) -> list[str]:
    """The hooks that ran operations, by name, each once, in order."""
    found = [program.where(node).hook for node in program.nodes()]
    return [name.rpartition(".")[2] for name in dict.fromkeys(found) if name is not None]


def trains_alike(program: whence.Program, model: nn.Module, *args: Any) -> None:
    """The gradients of the flat module and the tree are those of eager."""

    def trained(module: nn.Module) -> dict[str, Tensor | None]:
        return gradients(module, lambda: module(*args).sin().sum())

    expected = trained(model)
    assert equal(trained(program.module()), expected)
    assert equal(trained(program.unflatten()), expected)
