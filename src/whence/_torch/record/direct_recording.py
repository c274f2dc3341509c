"""Operators that a recording writes down by itself, in half the time of PyTorch's own way."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, snapshot_fake

from whence._torch.operators.fake_layouts import as_the_kernel_lays_out
from whence._torch.operators.schemas import has_size_of_data, is_composite
from whence._torch.operators.table import fake_kernel, rule_on_symbols, said_of
from whence._torch.record.annotations import note_function


def unaliased(result: Any) -> Any:
    """Results that are tensors of their own: a fake kernel may give one tensor twice, and gives two when the
    result comes from the cache of fake results."""
    if not isinstance(result, list | tuple) or len({id(part) for part in result}) == len(result):
        return result
    seen: set[int] = set()
    parts = [part if _is_first(part, seen) else snapshot_fake(part) for part in result]
    return type(result)(parts)


def run_on_fakes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: Any) -> Any:
    """What an operator gives, by its fake kernel or where sizes are open by a rule."""
    rule = None if environment is None else rule_on_symbols(func)
    given = rule(func, args, kwargs, environment) if rule else fake_kernel(func)(*args, **kwargs)
    return laid_out(func, args, kwargs, given)


def laid_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """`result` of a fake kernel with the strides that the real kernel gives, as tensors of their own."""
    rule = said_of(func).layout
    found = result if rule is None else rule(args, result)
    return unaliased(as_the_kernel_lays_out(func, args, kwargs, found))


def _is_first(part: Any, seen: set[int]) -> bool:
    known = id(part) in seen
    seen.add(id(part))
    return not (known and isinstance(part, Tensor))


class ComposedMet(Exception):
    """An operation got a tensor that is made of others: its class says what happens to those."""


class NotPlain(Exception):
    """An argument needs PyTorch's own recording."""


def is_plain(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator returns tensors, is no composite, and needs no tensor's value."""
    return _is_always_plain(func) or _is_index_by_numbers(func, args)


@cache
def _is_always_plain(func: Any) -> bool:
    if not isinstance(func, OpOverload) or func in _SPECIAL or torch.Tag.data_dependent_output in func.tags:
        return False
    if func.namespace != "aten" or has_size_of_data(func):
        return False
    if is_composite(func) and said_of(func).layout is None:
        return False
    if said_of(func).fake is not None:
        return True
    returned = [str(result.type) for result in func._schema.returns]
    return bool(returned) and (set(returned) == {"Tensor"} or returned == ["List[Tensor]"])


def snapshot_of(result: Any) -> Any:
    """What metadata holds of a result, or of several."""
    if isinstance(result, Tensor):
        return snapshot_fake(result)
    return [snapshot_of(part) for part in result] if isinstance(result, list | tuple) else result


def _is_index_by_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is an indexing whose result has a size that follows from sizes: not by True and False."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


_SPECIAL = frozenset(
    {torch.ops.aten.lift_fresh.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.size.default}
)


class GraphTracer(PythonKeyTracer):
    """Appends nodes to a graph of its own and tells about each."""

    def __init__(self, recorded: Callable[[fx.Node], None]) -> None:
        super().__init__()
        self.root = nn.Module()
        self.graph = fx.Graph(tracer_cls=PythonKeyTracer)
        self._recorded = recorded

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        note_function(self, node)
        self._recorded(node)
        return node

    def results_alive(self) -> Iterator[tuple[fx.Node, Tensor]]:
        """The operations whose results are held by more than metadata, that of graphs inside too."""
        tracked = ((slot.proxy.node, tensor) for tensor, slot in self.tensor_tracker.items())
        found = [(node, tensor) for node, tensor in tracked if node.meta.get("val") is not tensor]
        inner = (module.graph for module in self.root.modules() if isinstance(module, fx.GraphModule))
        graphs = (self.graph, *inner) if found else ()
        held = {id(node.meta.get("val")) for graph in graphs for node in graph.nodes}
        return ((node, tensor) for node, tensor in found if id(tensor) not in held)
