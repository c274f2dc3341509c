"""Are two programs one? Asked of a model's next run, and of sizes that a branch excludes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from whence._torch.graphs import nested_graph
from whence._torch.sizes.symbols import SYMBOLIC, are_same_at
from whence._torch.tensors import same_bits
from whence.program.calls import Constant
from whence.schema import InputKind

if TYPE_CHECKING:
    from whence.program.program import FlatProgram

aten = torch.ops.aten
Sizes = Mapping[str, int]
_RESIZING = frozenset(
    {
        *(aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default),
        *(aten.slice.Tensor, aten._reshape_copy.default, aten.slice_backward.default),
    }
)
"""They give their argument, or a part of it, in a shape: where shape and strides are the same, just that."""


def same_operations(left: "FlatProgram", right: "FlatProgram", at: Sizes | None = None) -> bool:
    """Whether two programs are one, operation for operation, over equal constants.

    `at` are sizes, by name, that are open in the first and these numbers in the second: what only computes
    sizes may differ then, and what resizes nothing at these.
    """
    if _rows_of_signature(left) != _rows_of_signature(right) or not _are_same_results(left, right):
        return False
    constants = [row.name for row in left.signature.inputs if row.kind is InputKind.CONSTANT]
    if not all(_is_same_tensor(left.state[name], right.state[name]) for name in constants):
        return False
    return _is_same_graph(left.graph_module, right.graph_module, at)


def _rows_of_signature(program: "FlatProgram") -> list[Any]:
    inputs = [(row.name, row.kind) for row in program.signature.inputs]
    return [inputs, *[(row.name, row.kind, row.of) for row in program.signature.outputs], program.result.spec]


def _are_same_results(left: "FlatProgram", right: "FlatProgram") -> bool:
    """Whether what each run returns unchanged is the same; a size may be a number in one of them."""
    pairs = zip(left.result.leaves, right.result.leaves, strict=True)
    return all(
        are_same_at(one.value, other.value, {})
        for one, other in pairs
        if isinstance(one, Constant) and isinstance(other, Constant)
    )


def _is_same_tensor(left: Tensor, right: Tensor) -> bool:
    """Whether a constant is the same, or holds the same numbers where each capture made it."""
    return left is right or same_bits(left, right)


def _is_same_graph(left: fx.GraphModule, right: fx.GraphModule, at: Sizes | None) -> bool:
    passed: dict[fx.Node, fx.Node] = {}
    rows = [_computing(each, at, passed) for each in (left, right)]
    if len(rows[0]) != len(rows[1]):
        return False
    partner: dict[fx.Node, fx.Node] = {}
    for node, other in zip(*rows, strict=True):
        partner[node] = other
        if not _is_same_call(node, other, at):
            return False
        if not _are_same(
            _arguments_passed(node, passed), _arguments_passed(other, passed), partner, at or {}
        ):
            return False
    return True


def _is_same_call(node: fx.Node, other: fx.Node, at: Sizes | None) -> bool:
    inner, nested = nested_graph(node), nested_graph(other)
    if inner is None or nested is None:
        return inner is nested and (node.op, node.target) == (other.op, other.target)
    return _is_same_graph(inner, nested, at)


def _arguments_passed(node: fx.Node, passed: Mapping[fx.Node, fx.Node]) -> Any:
    return fx.map_arg((node.args, node.kwargs), lambda each: passed.get(each, each))


def _computing(module: fx.GraphModule, at: Sizes | None, passed: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The nodes that compute more than sizes; `passed` is told of those that give, at these sizes, what they
    are given."""
    if at is None:
        return list(module.graph.nodes)
    rows = []
    for node in module.graph.nodes:
        if _gives_its_argument(node, at):
            passed[node] = passed.get(node.args[0], node.args[0])
        elif not (node.op == "call_function" and isinstance(node.meta.get("val"), SYMBOLIC)):
            rows.append(node)
    return rows


def _gives_its_argument(node: fx.Node, at: Sizes) -> bool:
    if node.op != "call_function" or node.target not in _RESIZING:
        return False
    found, given = (each.meta["val"] for each in (node, node.args[0]))  # type: ignore[union-attr]
    if found.dim() != given.dim():
        return False
    if not all(map(are_same_at, found.shape, given.shape, (at,) * found.dim())):
        return False
    steps = zip(found.shape, found.stride(), given.stride(), strict=True)
    return all(are_same_at(size, 1, at) or are_same_at(step, other, at) for size, step, other in steps)


def _are_same(left: Any, right: Any, partner: Mapping[fx.Node, fx.Node], at: Sizes) -> bool:
    if isinstance(left, fx.Node) and left in partner:
        return partner[left] is right
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(_are_same(*pair, partner, at) for pair in pairs)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_are_same(left[k], right[k], partner, at) for k in left)
    if isinstance(left, slice) and isinstance(right, slice):
        parts: Sequence[Any] = ("start", "stop", "step")
        return all(_are_same(getattr(left, part), getattr(right, part), partner, at) for part in parts)
    return are_same_at(_fake_of(left), _fake_of(right), at)


def _fake_of(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, fx.Node) else value
