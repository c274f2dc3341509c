"""Call modules of a model and of its tree alone, on the arguments they got when the whole model ran."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import whence
from tests.checks import Backward, differing
from tests.models import case
from whence.program import Absent


@dataclass(frozen=True)
class Made:
    """The first call of a module: its path and what it was called with."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Copies of the arguments, and the leaves behind those that require a gradient."""
        leaves, spec = tree_flatten((self.args, self.kwargs))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        copies = {key: t.detach().clone().requires_grad_(t.requires_grad) for key, t in tensors.items()}
        given = {key: copy.clone() for key, copy in copies.items()}
        args, kwargs = tree_unflatten([given.get(id(leaf), leaf) for leaf in leaves], spec)
        return args, kwargs, [copy for copy in copies.values() if copy.requires_grad]


def calls_made(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Made]:
    """The first call of every module in one run of the model, in order."""
    made: dict[str, Made] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            made.setdefault(path, Made(path, given, named))

        return hook

    modules = [(path, module) for path, module in model.named_modules() if path]
    hooks = [module.register_forward_pre_hook(note(path), with_kwargs=True) for path, module in modules]
    model(*args, **kwargs)
    for handle in hooks:
        handle.remove()
    return list(made.values())


def called_alone(module: nn.Module, call: Made, only: list[bool] | None = None) -> dict[str, Any]:
    """Outputs and gradients of one module called alone; `only` says which outputs to differentiate."""
    args, kwargs, inputs = call.fresh()
    module.zero_grad()
    torch.manual_seed(7)
    leaves = tree_leaves(module(*args, **kwargs))
    roots = [leaf for i, leaf in enumerate(leaves) if is_differentiable(leaf) and (only is None or only[i])]
    generator = torch.Generator().manual_seed(8)
    seeds = [torch.empty_like(root).copy_(torch.randn(root.shape, generator=generator)) for root in roots]
    torch.autograd.backward(roots, seeds)
    found = {
        f"output {i}": leaf.detach() if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)
    }
    found |= {f"gradient of input {i}": tensor.grad for i, tensor in enumerate(inputs)}
    return found | {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}


def is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def differences(name: str, backward: Backward, skip: frozenset[str] = frozenset()) -> list[str]:
    """Everything in which a case's modules called alone differ from those of its tree, over all modules."""
    row = case(name)
    model, args, kwargs = row.make()
    tree = whence.capture(model, args, kwargs, backward=backward).unflatten(copy=True)
    eager = deepcopy(model)
    found = []
    for call in calls_made(*row.make()):
        if call.path not in skip:
            found += [f"{call.path}: {problem}" for problem in _compared(eager, tree, call)]
    return found


def _compared(eager: nn.Module, tree: nn.Module, call: Made) -> list[str]:
    before = [{n: t.clone() for n, t in module.state_dict().items()} for module in (eager, tree)]
    try:
        args, kwargs, _ = call.fresh()
        given = tree_leaves(tree.get_submodule(call.path)(*args, **kwargs))
        for module, state in zip((eager, tree), before, strict=True):
            module.load_state_dict(state)
        found = called_alone(tree.get_submodule(call.path), call)
        expected = called_alone(
            eager.get_submodule(call.path), call, [is_differentiable(leaf) for leaf in given]
        )
    except whence.WhenceError as error:
        return [str(error)]
    absent = {f"output {i}" for i, leaf in enumerate(given) if isinstance(leaf, Absent)}
    for module, state in zip((eager, tree), before, strict=True):
        module.load_state_dict(state)
    return differing(*({k: v for k, v in side.items() if k not in absent} for side in (expected, found)))
