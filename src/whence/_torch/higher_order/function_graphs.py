"""Functions that an operator runs (branches, bodies of loops) as graphs of their own.

PyTorch has a rule for every such operator that says on which examples its functions are traced and what the
operator gives. The rules ask one variable of the process for the tracer that is at work; while a recording
runs one of them, that variable leads here. `make_fx`, which would be asked otherwise, patches `nn.Module` for
every thread.
"""

import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, overrides
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node
from torch.fx.experimental import proxy_tensor

from whence._torch.autograd.nodes import node_class_of
from whence._torch.patching import patched
from whence._torch.record.function_mode import FunctionMode
from whence._torch.versions.operator_calls import operators_uncompiled

Trace = Callable[[Any, tuple[Any, ...]], fx.GraphModule]
"""Makes the graph of a function on these arguments."""
_INDEX = torch.ops.aten.index.Tensor
_FLEX = "torch._higher_order_ops.flex_attention"


class _TracerStandIn:
    """Stands where PyTorch looks for the tracer at work; other threads get what was there before."""

    def __init__(self, trace: Trace, mode: FakeTensorMode, before: Any) -> None:
        self._thread = threading.get_ident()
        self._trace = trace
        self._mode = mode
        self._before = before
        self.is_over = False

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self._thread and not self.is_over

    @property
    def fake_tensor_mode(self) -> Any:
        if self.is_here:
            return self._mode
        return None if self._before is None else self._before.fake_tensor_mode

    def trace_subgraph(self, function: Any, *args: Any) -> fx.GraphModule:
        if self.is_here:
            return self._trace(function, args)
        if self._before is None:
            return proxy_tensor.make_fx(function)(*args)
        traced: fx.GraphModule = self._before.trace_subgraph(function, *args)
        return traced

    def trace_subgraph_custom_decomp(self, function: Any, table: Any, *args: Any) -> fx.GraphModule:
        """The graph of a function; in a recording nothing is decomposed."""
        if self.is_here or self._before is None:
            return self.trace_subgraph(function, *args)
        traced: fx.GraphModule = self._before.trace_subgraph_custom_decomp(function, table, *args)
        return traced

    def make_fx(self, function: Any, *options: Any, **more: Any) -> Callable[..., fx.GraphModule]:
        """What `make_fx` gives, for rules that call it themselves."""
        if not self.is_here:
            return proxy_tensor.make_fx(function, *options, **more)
        return lambda *args: self._trace(function, args)


@contextmanager
def functions_traced(trace: Trace, mode: FakeTensorMode) -> Iterator[None]:
    """Inside the block, rules of operators on this thread have their functions traced by `trace`."""
    tracer = _TracerStandIn(trace, mode, proxy_tensor._CURRENT_MAKE_FX_TRACER)
    try:
        with ExitStack() as active:
            active.enter_context(patched(proxy_tensor, "_CURRENT_MAKE_FX_TRACER", tracer))
            if (flex := sys.modules.get(_FLEX)) is not None:
                active.enter_context(patched(flex, "make_fx", tracer.make_fx))
            yield
    finally:
        tracer.is_over = True


@contextmanager
def operators_called_directly() -> Iterator[None]:
    """Let `torch.cond` and its like call their operators on this thread, where they would compile the call.

    A region marked with `nested_compile_region` runs as it does in eager mode.
    """
    here = threading.get_ident()
    regions: Any = sys.modules["torch._higher_order_ops.invoke_subgraph"]
    enter = regions.invoke_subgraph_placeholder

    def entered(function: Any, *args: Any, **kwargs: Any) -> Any:
        return (enter if threading.get_ident() != here else _call)(function, *args, **kwargs)

    with operators_uncompiled(), patched(regions, "invoke_subgraph_placeholder", entered):
        yield


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@contextmanager
def functions_unwatched() -> Iterator[None]:
    """Inside the block no recording on this thread looks at torch functions; other modes stay."""
    modes = overrides._get_current_function_mode_stack()
    watching = any(isinstance(mode, FunctionMode) for mode in modes)
    if not watching:
        yield
        return
    _set_function_modes([mode for mode in modes if not isinstance(mode, FunctionMode)])
    try:
        yield
    finally:
        _set_function_modes(modes)


def _set_function_modes(modes: list[Any]) -> None:
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


@dataclass(frozen=True)
class Played:
    """Runs a recorded graph node by node, and says which node is running."""

    module: fx.GraphModule
    playing: Callable[[fx.Node], AbstractContextManager[None]]

    def __call__(self, *args: Any) -> Any:
        """What the graph gives on these arguments."""
        given = iter(args)
        values: dict[fx.Node, Any] = {}
        for node in self.module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            values[node] = next(given) if node.op == "placeholder" else self._value(node, values)
        return None

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            held = getattr(self.module, str(node.target))
            return Played(held, self.playing) if isinstance(held, fx.GraphModule) else held
        given: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        (args, kwargs), target = given, node.target
        if target is _INDEX and _indexing() is not None and None not in args[1]:
            target, args = operator.getitem, (args[0], tuple(args[1]))
        with self.playing(node):
            return target(*args, **kwargs)  # type: ignore[operator]

    def __deepcopy__(self, _memo: Any) -> "Played":
        return self


def _indexing() -> Any:
    """The module of the mode in which flex attention indexes by tensors, with a derivative that can be
    mapped; None where the mode is not active."""
    loaded: Any = sys.modules.get("torch._dynamo._trace_wrapped_higher_order_op")
    modes = overrides._get_current_function_mode_stack()
    active = loaded is not None and any(isinstance(mode, loaded.TransformGetItemToIndex) for mode in modes)
    return loaded if active else None


def indexes_for_attention(node: Node) -> bool:
    """Whether an autograd node is that of an index of flex attention: made anew when it is played."""
    loaded = _indexing()
    return loaded is not None and isinstance(node, node_class_of(loaded.ModIndex))


@contextmanager
def recording_paused() -> Iterator[None]:
    """Inside the block, nothing on this thread is recorded."""
    with functions_unwatched(), proxy_tensor.disable_proxy_modes_tracing():
        yield


def let_values_go(traced: list[fx.GraphModule]) -> None:
    """Give the nodes of graphs values of their own, once the run is over: PyTorch's rules for operators that
    run graphs return the very values, to which autograd adds what they came of, with all that this keeps."""
    while traced:
        for node in traced.pop().graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.grad_fn is not None:
                with recording_paused():
                    node.meta["val"] = value.detach()


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is at work on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_of_transform(value: Any) -> bool:
    """Whether a value is one that a transform of `torch.func` made for its own run."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def played(function: Any) -> Played | None:
    """The recorded graph behind a function that plays one."""
    if isinstance(function, fx.GraphModule):
        function = vars(function).get("forward")
    return function if isinstance(function, Played) else None


def let_play(module: fx.GraphModule, playing: Callable[[fx.Node], AbstractContextManager[None]]) -> None:
    """Let a graph say which node is running when it is called. PyTorch compiles graphs of scans that it only
    takes apart, and warns that it does not: these have nothing to compile."""
    vars(module).update(forward=Played(module, playing), compile=_compile_nothing)


def _compile_nothing() -> None:
    """Nothing is compiled."""


def stop_playing(module: fx.GraphModule) -> None:
    """Let a graph be run by its own code from now on."""
    for name in ("forward", "compile"):
        vars(module).pop(name, None)
