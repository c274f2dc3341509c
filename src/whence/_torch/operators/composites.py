"""Composites that a recording of a forward keeps whole, as PyTorch's export does.

What `matmul`, `linear` and attention are made of depends on the grad mode, the device and on sizes. A forward
that autograd differentiates when it runs keeps them as they are, so that each run takes them apart as eager
does. None of them returns a tensor that shares memory with an argument, or writes to one.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from whence._torch.autograd.nodes import below_autograd
from whence._torch.autograd.switches import switches
from whence._torch.operators.schemas import short_name
from whence._torch.pytrees import tree_flatten
from whence._torch.record.annotations import note_function
from whence._torch.record.direct_recording import ComposedMet, NotPlain
from whence._torch.tensors import PLAIN_TENSORS, autocast_state, storage_of

if TYPE_CHECKING:
    from whence._torch.record.recorder import Recorder

aten = torch.ops.aten


@dataclass(frozen=True)
class CompositeCall:
    """The arguments of a composite as its operator takes them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Composite:
    """An operator, and how a torch function's arguments become its own; None to take it apart.

    One that `may_view` gives a view or a copy, as sizes have it. Where it was a copy, of open sizes, that is
    what `operator` makes, and the node is marked: if nobody writes to it, every run decides again.
    """

    operator: OpOverload
    bind: Callable[..., CompositeCall | None]
    may_view: bool = False

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompositeCall | None:
        """The call; None for tensors that stand for many, under autocast, and for what does not fit."""
        try:
            call = self.bind(*args, **kwargs)
        except TypeError:
            return None  # the function says what is wrong
        return call if call is not None and _is_simple(call) else None


def _is_simple(call: CompositeCall) -> bool:
    tensors = [leaf for leaf in tree_flatten(call.args)[0] if isinstance(leaf, Tensor)]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if autocast_state():
        return False
    return all(isinstance(tensor, (FakeTensor, *PLAIN_TENSORS)) for tensor in tensors)


def _product(input: Any, other: Any) -> CompositeCall:
    return CompositeCall((input, other))


def _reflected(input: Any, other: Any) -> CompositeCall:
    return CompositeCall((other, input))


def _linear(input: Any, weight: Any, bias: Any = None) -> CompositeCall:
    return CompositeCall((input, weight) if bias is None else (input, weight, bias))


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> CompositeCall:
    args, defaults = [query, key, value, attn_mask, dropout_p, is_causal], [None, 0.0, False]
    while defaults and (args[-1] is defaults[-1] or args[-1] == defaults[-1]):
        args.pop()
        defaults.pop()
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return CompositeCall(tuple(args), given)


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_cudnn: bool
) -> CompositeCall:
    return CompositeCall((input, list(normalized_shape), weight, bias, eps))


def _dropout(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> CompositeCall | None:
    count = input.numel()
    gives_input = not training or not p or (type(count) is int and not count)
    return CompositeCall((input, p, True)) if not inplace and not gives_input else None


def _recurrent(input: Any, hidden: Any, parameters: Any, *options: Any) -> CompositeCall | None:
    """Those of packed rows have sizes second, and are taken apart."""
    is_packed = isinstance(options[0], list | tuple)
    return None if is_packed else CompositeCall((input, hidden, parameters, *options))


def _contiguous(input: Any, *, memory_format: Any = torch.contiguous_format) -> CompositeCall | None:
    kept = memory_format is torch.contiguous_format
    return CompositeCall((input,), {"memory_format": memory_format}) if kept else None


def _reshape(input: Any, *_shape: Any, **_named: Any) -> CompositeCall:
    return CompositeCall((input,))


_MATMUL = Composite(aten.matmul.default, _product)

_BY_FUNCTION: dict[Any, Composite] = {
    F.linear: Composite(aten.linear.default, _linear),
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    Tensor.__rmatmul__: Composite(aten.matmul.default, _reflected),
    F.scaled_dot_product_attention: Composite(aten.scaled_dot_product_attention.default, _attention),
    F.layer_norm: Composite(aten.layer_norm.default, _layer_norm),
    F.dropout: Composite(aten.dropout.default, _dropout),
    torch.lstm: Composite(aten.lstm.input, _recurrent),
    torch.gru: Composite(aten.gru.input, _recurrent),
    torch.rnn_tanh: Composite(aten.rnn_tanh.input, _recurrent),
    torch.rnn_relu: Composite(aten.rnn_relu.input, _recurrent),
}
_CONTIGUOUS = Composite(aten.clone.default, _contiguous, may_view=True)
_RESHAPE = Composite(aten._reshape_copy.default, _reshape, may_view=True)
COMPOSITES: Mapping[Any, Composite] = {
    **{row.operator: row for row in _BY_FUNCTION.values() if row.bind is not _reflected},
    **_BY_FUNCTION,
    **dict.fromkeys((Tensor.contiguous, aten.contiguous.default), _CONTIGUOUS),
    **dict.fromkeys((Tensor.reshape, torch.reshape, aten.reshape.default), _RESHAPE),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _RESHAPE),
}
"""Captured programs call the operators themselves."""
MAY_VIEW = "whence_may_view"
"""Marks, in the metadata of a node, a copy that is a view at some sizes."""


def count_of(node: fx.Node) -> int:
    """About how many operators run in a recording where there is one node."""
    return 3 if node.target in COMPOSITES or MAY_VIEW in node.meta else 1


def keep_whole(recorder: "Recorder", composite: Composite, function: Any, args: Any, kwargs: Any) -> Any:
    """Record a composite as one node: what it is made of runs, and is not written down.

    None where it is to be taken apart.
    """
    call = composite.call(args, kwargs)
    if call is None or recorder.is_inside_composite or not _is_kept(recorder, composite):
        return None
    try:
        known = recorder.recognised(call.args)
        nodes = recorder.as_nodes(known)
    except (ComposedMet, NotPlain):
        return None
    with _inside(recorder):
        result = function(*args, **kwargs)
    if composite.may_view and (
        not isinstance(result, FakeTensor) or storage_of(result) == storage_of(known[0])
    ):
        return None
    if composite is _RESHAPE:
        nodes = (*nodes, recorder.as_nodes(list(result.shape)))
    func = composite.operator
    node = _appended(recorder, func, nodes, dict(call.kwargs), result)
    node.meta |= {MAY_VIEW: True} if composite.may_view else {}
    for position, part in enumerate(result if isinstance(result, tuple) else ()):
        _appended(recorder, operator.getitem, (node, position), {}, part)
    return result


def _is_kept(recorder: "Recorder", composite: Composite) -> bool:
    """Not where the model has turned a switch that decides what it is made of, or gradients off: what is
    detached takes another way then. Recurrent networks of open sizes run as Python code, which looks at them.
    """
    is_open = recorder.environment is not None
    if recorder.listener.model.stops_gradients():
        return False
    if (composite.may_view or composite.bind is _recurrent) and composite.may_view is not is_open:
        return False
    return switches() == recorder.switches


def _appended(recorder: "Recorder", func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> fx.Node:
    """A node with its value, which autograd does not see; the listener asks for the model's grad mode."""
    node = recorder.graph.create_node("call_function", func, args, kwargs, short_name(func))
    note_function(recorder.tracer, node)
    with disable_proxy_modes_tracing(), below_autograd():
        recorder.track(result, node)
    recorder.listener.recorded(node)
    return node


@contextmanager
def _inside(recorder: "Recorder") -> Iterator[None]:
    """Record nothing inside the block."""
    environment: Any = recorder.environment
    recorder.is_inside_composite = True
    if environment is not None:
        environment.keeps_whole = True
    try:
        yield
    finally:
        recorder.is_inside_composite = False
        if environment is not None:
            environment.keeps_whole = False


_CALLS_COMPOSITES = frozenset({F.multi_head_attention_forward})


def calls_composites(func: Any) -> bool:
    """Whether it is a Python function of PyTorch's that calls composites, out of sight of function modes."""
    return func in _CALLS_COMPOSITES


@cache
def in_sight(func: FunctionType) -> FunctionType:
    """The function with its calls in sight: it does not look for modes that would run it in its own place."""
    unasked = {name: _nobody for name in func.__globals__ if name.startswith("has_torch_function")}
    twin = FunctionType(func.__code__, func.__globals__ | unasked, func.__name__, func.__defaults__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def _nobody(*_args: Any) -> bool:
    return False
