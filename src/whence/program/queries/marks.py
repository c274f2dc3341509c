"""What an operation is besides its phase: of the loss, computed again, kept, drawn at random."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import fx

from whence._torch.operators.schemas import draws
from whence._torch.sizes.symbols import SYMBOLIC
from whence.program.node_records import origin_of
from whence.schema import Aspect, OutputKind, Phase

if TYPE_CHECKING:
    from whence.program.program import FlatProgram

READS_NO_VALUE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("ones_like", "zeros_like", "full_like", "empty_like", "new_zeros", "new_empty")
)
"""Operators that read no value, but how large it is."""
READ_SIZES = frozenset(
    getattr(torch.ops.aten, f"sym_{name}") for name in ("size", "stride", "numel", "storage_offset")
)
_SEED = torch.ops.aten.ones_like.default


def marked(program: "FlatProgram", mark: Aspect) -> Set[fx.Node]:
    return frozenset(_FOUND[mark](program))


def written_behind_autograd(program: "FlatProgram") -> frozenset[str]:
    """The inputs that are written through `.data` alone: what autograd keeps of one has its newest value."""
    straight, copies = program.facts.straight_through, torch.ops.aten.copy.default
    return frozenset(
        name
        for name, values in program.facts.histories.items()
        if all(value in straight and program.node(value).target is copies for value in values)
    )


def is_drawn(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    return node.op == "call_function" and draws(node.target, node.args, dict(node.kwargs))


def _loss(program: "FlatProgram") -> Iterator[fx.Node]:
    """What computes the value that is differentiated, outside of any module, from what the model returned.

    Where a function was captured no module says where the model ends: what leads to a result is the model's.
    """
    losses = list(_losses(program))
    rows = program.signature.outputs_of(OutputKind.USER)
    results = [program.node(row.node) for row in rows if row.node is not None]
    is_function = program.calls.entry == 0 and program.step is None
    models = leading_to(node for node in results if node not in losses) if is_function else frozenset()
    for node in leading_to(losses) - models - _size_operations(program):
        outside = not origin_of(node).calls and origin_of(node).phase is Phase.FORWARD
        if node.op == "call_function" and (outside or node in losses):
            yield node


def _size_operations(program: "FlatProgram") -> Set[fx.Node]:
    """Operations on sizes alone, which no number in a tensor goes into."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        is_number = isinstance(node.meta.get("val"), (int, float, *SYMBOLIC))
        reads_size = getattr(node.target, "overloadpacket", None) in READ_SIZES
        if (
            node.op == "call_function"
            and is_number
            and (reads_size or found.issuperset(node.all_input_nodes))
        ):
            found.add(node)
    return found


def _losses(program: "FlatProgram") -> Iterator[fx.Node]:
    """The values at which a backward begins."""
    yield from (program.node(row.node) for row in program.signature.outputs_of(OutputKind.LOSS) if row.node)
    for node in program.graph.nodes:
        origin = origin_of(node)
        begins = node.target is _SEED and origin.phase is Phase.BACKWARD and origin.forward is None
        yield from node.all_input_nodes if begins and not origin.calls else ()


def leading_to(nodes: Iterable[fx.Node], through: Callable[[fx.Node], bool] = lambda _: True) -> Set[fx.Node]:
    """These nodes, and all that they are computed from, `through` operations of which that holds."""
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        found = set(node.all_input_nodes) - seen if through(node) else set()
        seen |= found
        waiting += found
    return seen


def _recomputed(program: "FlatProgram") -> Iterator[fx.Node]:
    return (node for node in program.nodes() if origin_of(node).recomputed)


def _saved_nodes(program: "FlatProgram") -> Iterator[fx.Node]:
    """Values of the forward that an operation of the backward reads; `memory().kept` says what they take."""
    for node in program.nodes():
        is_forward = node.op == "call_function" and origin_of(node).phase is Phase.FORWARD
        if is_forward and any(map(_reads_it, node.users)):
            yield node


def _reads_it(user: fx.Node) -> bool:
    operator = getattr(user.target, "overloadpacket", None)
    in_backward = user.op == "call_function" and origin_of(user).phase is Phase.BACKWARD
    return in_backward and operator not in READS_NO_VALUE


def _random(program: "FlatProgram") -> Iterator[fx.Node]:
    return filter(is_drawn, program.nodes())


_FOUND: Mapping[Aspect, Callable[["FlatProgram"], Iterator[fx.Node]]] = MappingProxyType(
    {Aspect.LOSS: _loss, Aspect.RECOMPUTED: _recomputed, Aspect.SAVED: _saved_nodes, Aspect.RANDOM: _random}
)
