"""How many floating-point operations a node takes: by PyTorch's formulas, by ours, or named as a gap.

A multiplication and an addition are two; element-wise operations, sums and copies count as none. That is the
convention of `torch.utils.flop_counter`, whose registry is asked first, so numbers agree with its
`FlopCounterMode`. What it leaves out and we have a formula for is counted and told apart (`Flops.beyond`).

A graph that a node holds runs as often as that says: branches of a `cond`, what a loop or a map repeats.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from whence._torch.fakes import FakeTensorMode, fake_at
from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import is_composite, op_name
from whence._torch.pytrees import tree_flatten, tree_unflatten
from whence._torch.sizes.drawn_numbers import DRAWN
from whence._torch.sizes.numbers import OF_DECISIONS
from whence._torch.sizes.symbols import SYMBOLIC, mode_for_sizes, open_shape, size_at
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.dependence.asking import Failed, attempt

aten = torch.ops.aten
BUILTIN_KINDS = (BuiltinFunctionType, FunctionType)
Sizes = Mapping[str, int]
_MULTIPLIES = frozenset(
    (
        *("mm", "bmm", "attention", "linalg", "fft", "rnn", "lstm", "gru", "solve", "cholesky", "cdist"),
        *("trilinear", "convolution", "conv", "conv1d", "conv2d", "conv3d", "addbmm", "pdist"),
    )
)
"""Words in names of operators that multiply."""
_SUM = frozenset(("linalg", "vector", "norm"))
"""One whose name says so, and that is a sum: clipping gradients takes it."""


@dataclass(frozen=True)
class Flops:
    """The FLOPs of one node; `beyond` are those by formulas of our own, `gap` says why they are not known."""

    count: int = 0
    beyond: int = 0
    gap: str | None = None


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return sdpa_backward_flop_count(gradient, query, key, value)


def _matrix_vector(matrix: Any, *_: Any, **__: Any) -> Any:
    return 2 * matrix[0] * matrix[1]


def _inner(left: Any, *_: Any, **__: Any) -> Any:
    return 2 * left[0]


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> Any:
    """Groups of rows, columns or of what is added up; as many products where both have such a dimension."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _grouped_backward(*shapes: Any, **__: Any) -> Any:
    return 2 * _grouped(*shapes)


def _recurrent(given: Any, inner: Any, hidden: Any, *_: Any, **__: Any) -> Any:
    """A layer of oneDNN's LSTM: every step multiplies by both matrices."""
    return 2 * prod(given[:-1]) * (prod(inner) + prod(hidden))


def _recurrent_backward(*shapes: Any, **__: Any) -> Any:
    """As many for the gradients of what is given, and for those of the matrices."""
    return 2 * _recurrent(*shapes)


_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu
OWN: Mapping[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention: _attention,
    _ON_CPU: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mv: _matrix_vector,
    aten.addmv: lambda _bias, matrix, *_, **__: _matrix_vector(matrix),
    aten.dot: _inner,
    aten.vdot: _inner,
    aten._grouped_mm: _grouped,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
"""Formulas over shapes, as those of PyTorch's registry are."""
_OF_LIBRARIES: Mapping[str, Callable[..., Any]] = {
    "transformers.grouped_mm_fallback": _grouped,
    "transformers.grouped_mm_fallback_backward": _grouped_backward,
}
"""The same for operators that are there only where a library is, by name."""


_MADE_OF_PRODUCTS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.linear, aten.matmul), lambda left, *_, **__: left[-1]),
    **dict.fromkeys((aten.conv1d, aten.conv2d, aten.conv3d), lambda _, weight, *__: prod(weight[1:])),
}
"""Composites of which each element of the result is a sum of so many products."""


def flops_of(node: fx.Node, sizes: Sizes, known: dict[Any, Flops]) -> Flops:
    """The FLOPs of a node where open sizes are these numbers; `known` are those of others with the same."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet not in flop_registry and not _has_own(node.target):
        return Flops(gap="no formula" if _may_multiply(node.target) else None)
    key = _seen_by_formulas((node.target, node.args, node.kwargs, node.meta.get("val")), sizes)
    if key not in known:
        known[key] = _flops(node, sizes)
    return known[key]


@cache
def _has_own(target: Any) -> bool:
    return _own_formula(getattr(target, "overloadpacket", target)) is not None or is_composite(target)


def _own_formula(packet: Any) -> Callable[..., Any] | None:
    return OWN.get(packet) or _OF_LIBRARIES.get(str(packet))


def _seen_by_formulas(value: Any, sizes: Sizes) -> Any:
    """All that formulas see of arguments, by which they are looked up."""
    if isinstance(value, fx.Node):
        return _seen_by_formulas(value.meta.get("val"), sizes)
    if isinstance(value, Tensor):
        return shape_at(value, sizes), value.dtype
    if isinstance(value, Mapping):
        return tuple((name, _seen_by_formulas(held, sizes)) for name, held in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_seen_by_formulas(held, sizes) for held in value)
    return repr(value) if isinstance(value, SYMBOLIC) else (type(value), value)


def _flops(node: fx.Node, sizes: Sizes) -> Flops:
    packet = getattr(node.target, "overloadpacket", node.target)
    own = _own_formula(packet)
    args, kwargs = _arguments_made(node, lambda value: _meta(value, sizes))
    found: Flops | Failed
    if packet in flop_registry:
        result = _mapped(lambda value: _meta(value, sizes), node.meta.get("val"))
        found = attempt(lambda: Flops(int(flop_registry[packet](*args, **kwargs, out_val=result))))
    elif own is not None:
        found = attempt(lambda: _counted(packet, int(own(*_shapes(args)))))
    else:
        found = attempt(lambda: _of_decomposition(node, sizes))
    return Flops(gap=str(found.error)) if isinstance(found, Failed) else found


def _counted(packet: Any, count: int) -> Flops:
    """By a formula of our own; PyTorch counts attention on a CPU in releases that know its kernel."""
    is_known = packet is aten.scaled_dot_product_attention and _ON_CPU in flop_registry
    return Flops(count, beyond=0 if is_known else count)


@cache
def _may_multiply(target: Any) -> bool:
    """Operators of other libraries, functions over graphs, and those whose names say so."""
    namespace, _, name = op_name(target).partition(".")
    if (
        isinstance(target, BUILTIN_KINDS)
        or target in (*OF_DECISIONS, DRAWN)
        or namespace in ("getitem", "prims")
    ):
        return False
    words = frozenset(name.replace(".", "_").split("_"))
    return namespace != "aten" or not (_MULTIPLIES.isdisjoint(words) or words >= _SUM)


def _of_decomposition(node: fx.Node, sizes: Sizes) -> Flops:
    """What its parts take, as eager takes them apart without gradients, on tensors without memory.

    Those of a CPU stay there: composites take kernels of oneDNN on no other device.
    """
    mode = mode_for_sizes(vary=False)
    args, kwargs = _arguments_made(node, lambda value: _on_its_device(value, sizes, mode))
    own = {packet: formula for packet, formula in OWN.items() if packet not in flop_registry}
    counter = FlopCounterMode(display=False, custom_mapping=own)
    with torch.no_grad(), mode, counter:
        node.target(*args, **kwargs)  # type: ignore[operator]
    counts = counter.get_flop_counts().get("Global", {})
    return Flops(int(sum(counts.values())), beyond=int(sum(counts.get(packet, 0) for packet in own)))


def open_flops(node: fx.Node) -> Any:
    """The FLOPs of a node over the names of its open sizes; None where no formula says them."""
    packet = getattr(node.target, "overloadpacket", node.target)
    given: Any = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    leaves, spec = tree_flatten((*given, node.meta.get("val")))
    shapes = [open_shape(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs, result = tree_unflatten(shapes, spec)
    if packet in flop_registry:
        found = attempt(lambda: flop_registry[packet](*args, **kwargs, out_val=result))
    elif packet in _MADE_OF_PRODUCTS:
        found = attempt(lambda: 2 * prod(result) * _MADE_OF_PRODUCTS[packet](*args))
    else:
        own = _own_formula(packet)
        found = None if own is None else attempt(lambda: own(*args))
    return None if isinstance(found, Failed) else found


def open_bytes(value: Any) -> Any:
    """The bytes of tensors over the names of their open sizes."""
    tensors = (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))
    return sum(prod(open_shape(tensor)) * tensor.dtype.itemsize for tensor in tensors)


def _arguments_made(node: fx.Node, made: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The arguments, with what is made of each leaf in its place."""
    given: Any = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    return _mapped(made, given)  # type: ignore[no-any-return]


def _mapped(made: Callable[[Any], Any], value: Any) -> Any:
    leaves, spec = tree_flatten(value)
    return tree_unflatten([made(leaf) for leaf in leaves], spec)


def _on_its_device(value: Any, sizes: Sizes, mode: FakeTensorMode) -> Any:
    if isinstance(value, Tensor) and value.device.type == "cpu":
        shape = shape_at(value, sizes)
        return fake_at(mode, value.device, value.dtype, shape, torch.empty(shape, device="meta").stride())
    return value if value == torch.device("cpu") else _meta(value, sizes)


def _meta(value: Any, sizes: Sizes) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(shape_at(value, sizes), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return size_at(value, sizes) if isinstance(value, SYMBOLIC) else value


def _shapes(args: Any) -> list[Any]:
    return [value.shape if isinstance(value, Tensor) else value for value in args]


def shape_at(tensor: Tensor, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a fake tensor where open sizes are these numbers."""
    return tuple(size if type(size) is int else int(size_at(size, sizes)) for size in tensor.shape)


def bytes_at(value: Any, sizes: Sizes) -> int:
    leaves = [value] if isinstance(value, Tensor) and not is_composed(value) else tree_flatten(value)[0]
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    return sum(prod(shape_at(tensor, sizes)) * tensor.dtype.itemsize for tensor in tensors)


_OVER: Mapping[str, int] = {"scan": 2, "map_impl": 1}
"""Operators that run a graph for each item of an argument, and which argument that is."""


def held_graphs(node: fx.Node) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """The graphs that a node runs, each with the node that reads it."""
    for source in node.all_input_nodes:
        if (inner := nested_graph(source)) is not None:
            yield source, inner


def is_branch(node: fx.Node) -> bool:
    """Whether one of the graphs that a node holds runs, and the others do not."""
    return op_name(node.target) == "cond"


def runs_of(node: fx.Node, sizes: Mapping[str, int]) -> int | None:
    """How often a node runs each graph that it holds; None where that is not known: once or more."""
    if is_branch(node):
        return 1
    place = _OVER.get(op_name(node.target))
    if place is None:
        return None
    items = [source.meta.get("val") for source in tree_flatten(node.args[place])[0]]
    lengths = {shape_at(item, sizes)[0] for item in items if isinstance(item, Tensor)}
    return lengths.pop() if len(lengths) == 1 else None


def trips_of(reading: fx.Node, sizes: Mapping[str, int]) -> int:
    """How often a graph runs, by the node that reads it; once where nobody knows."""
    users = [node for node in reading.users if node.op == "call_function"]
    return sum(runs_of(node, sizes) or 1 for node in users) if users else 1
