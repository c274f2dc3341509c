"""What a run computed, to be compared with another run."""

from collections.abc import Set
from typing import Any

import torch
from torch import fx

from whence._torch.operators.schemas import OpOverload, op_name
from whence._torch.pytrees import tree_flatten
from whence.tracing.steps.session import StepSession

Operations = tuple[tuple[str, tuple[Any, ...]], ...]
"""Operators with the numbers that they are given."""
aten = torch.ops.aten
PASSED_ON = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
"""What gives the tensor that it is given."""


def operations_of(session: StepSession, without: Set[fx.Node] = frozenset()) -> Operations:
    """What is computed with tensors, in order, and the numbers that are known."""
    return tuple(
        (
            op_name(node.target),
            tuple(map(session.step.counting.value, tree_flatten((node.args, node.kwargs))[0])),
        )
        for node in session.log.order
        if node not in without and isinstance(node.target, OpOverload) and not _is_of_numbers(node)
    )


def _is_of_numbers(node: fx.Node) -> bool:
    """Whether it makes a tensor of numbers of Python's: a constant where they are known, nodes where not."""
    if node.target is aten.stack.default:
        return all(part.target is aten.scalar_tensor.default for part in node.all_input_nodes)
    return node.target in (*PASSED_ON, aten.scalar_tensor.default)
