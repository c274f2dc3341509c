"""Copies of programs: what a deep copy has of its own, and what no copy can take to another process."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from whence._torch.graphs import own_copy
from whence._torch.subclasses.wrapper_subclasses import plain_parts
from whence.errors import CallError
from whence.program.program import Program
from whence.program.signature import Whole

P = TypeVar("P", bound=Program)


def deep_copy(program: P, memo: dict[int, Any]) -> P:
    """The program with a graph and tensors of its own; facts about the capture are the same for both.

    Graphs are long chains of nodes, and those of tensors that a tracer made: neither is to be walked by
    `copy.deepcopy`.
    """
    copy_results(program.state.values(), memo)
    wholes = tuple(replace(whole, tensor=deepcopy(whole.tensor, memo)) for whole in program.signature.wholes)
    state = _state(program.state, wholes, memo)
    held = {row.path: state[row.name] for row in program.signature.attributes}
    graph = own_copy(program.graph_module, program.name, held)
    signature = replace(program.signature, wholes=wholes)
    variants = tuple(deep_copy(each, memo) for each in program.variants)
    return program.with_changes(graph_module=graph, signature=signature, state=state, variants=variants)


def copy_results(tensors: Iterable[Any], memo: dict[int, Any]) -> dict[int, Any]:
    """The memo with copies of tensors that `copy.deepcopy` refuses: those that something computed.

    So is a constant that requires a gradient, in an exported program that was loaded. A copy begins anew.
    """
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not tensor.is_leaf and id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_()
    return memo


def _state(state: Mapping[str, Tensor], wholes: tuple[Whole, ...], memo: dict[int, Any]) -> dict[str, Tensor]:
    """Copies of all tensors; parts of a tensor that is made of others are those of its copy."""
    parts: dict[str, Any] = {}
    for whole in wholes:
        if whole.tensor is not None:
            parts |= dict(zip(whole.parts, (part for _, part in plain_parts(whole.tensor)), strict=True))
            parts[whole.name] = whole.tensor
    return {name: parts[name] if name in parts else deepcopy(held, memo) for name, held in state.items()}


def refuse_pickling(what: str) -> NoReturn:
    """Raise `CallError` for what another process would make something else of."""
    raise CallError(
        f"{what} cannot be pickled",
        why="its modules are of classes whose own code would run in the place of what was captured",
        remedy="pickle program.unflatten(), or save the program, program.save(path), and its state_dict",
    )
