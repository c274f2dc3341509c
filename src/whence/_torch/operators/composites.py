"""Composites that a recording of a forward keeps whole, as PyTorch's export does.

What `matmul`, `linear` and attention are made of depends on the grad mode, the device and on sizes. A forward
that autograd differentiates when it runs keeps them as they are, so that each run takes them apart as eager
does. None of them returns a tensor that shares memory with an argument, or writes to one.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
from whence._torch.operators.schemas import named_arguments, short_name
from whence._torch.pytrees import tree_flatten
from whence._torch.record.annotations import note_function
from whence._torch.record.direct_recording import ComposedMet, NotPlain
from whence._torch.tensors import PLAIN_TENSORS, autocast_state, storage_of

if TYPE_CHECKING:
    from whence._torch.record.recorder import Recorder

aten = torch.ops.aten


_COMPARED = frozenset({type(None), bool, int, float, str, list})


@dataclass(frozen=True)
class CompositeCall:
    """The arguments of a composite as its operator takes them; another overload of it, where they are its."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    overload: OpOverload | None = None


@dataclass(frozen=True)
class Composite:
    """An operator, and how a torch function's arguments become its own, where they are not the same.

    `bind` gives None for a call that is to be taken apart.

    One that `may_view` gives a view or a copy, as sizes have it. Where it was a copy, of open sizes, that is
    what `operator` makes, and the node is marked: if nobody writes to it, every run decides again.

    What is `alike_apart` is made of the same in every grad mode. `mask` is the name of an argument whose
    gradient decides how the result lies in memory.
    """

    operator: OpOverload
    bind: Callable[..., CompositeCall | None] | None = None
    may_view: bool = False
    alike_apart: bool = False
    mask: str | None = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompositeCall | None:
        """The call; None for tensors that stand for many, under autocast, and for what does not fit."""
        try:
            call = self.bind(*args, **kwargs) if self.bind else _as_declared(self.operator, args, kwargs)
        except (TypeError, KeyError):
            return None  # the function says what is wrong
        if call is None or not _is_simple(call):
            return None
        return replace(call, args=_without_defaults(call.overload or self.operator, call.args))


class _Needed:
    """In the place of the default of an argument that has none."""


@dataclass(frozen=True)
class _Parameter:
    """An argument of an operator as its function has it; `count` is how many numbers a list must have."""

    name: str
    default: Any
    by_name: bool
    is_list: bool
    count: int | None

    def taken(self, value: Any) -> Any:
        """What the operator takes for it; raises `TypeError` for what belongs to another operator."""
        if not self.is_list:
            return value
        found = _as_list(value, self.count or 1)
        if any(each is None or isinstance(each, str) for each in found):
            raise TypeError
        return found


@cache
def _operator_parameters(operator: OpOverload) -> tuple[_Parameter, ...]:
    return tuple(
        _Parameter(
            "input" if row.name == "self" else row.name,
            row.default_value if row.has_default_value() else _Needed,
            row.kwarg_only,
            row.type.kind() == "ListType",
            row.N,  # type: ignore[attr-defined]
        )
        for row in operator._schema.arguments
    )


def _as_declared(operator: OpOverload, args: tuple[Any, ...], named: Mapping[str, Any]) -> CompositeCall:
    """The call of a function whose arguments have the names and the order of its operator's."""
    rows = _operator_parameters(operator)
    given = {row.name: row.default for row in rows}
    given |= {**dict(zip(given, args, strict=False)), **named}
    if len(given) > len(rows) or any(value is _Needed for value in given.values()):
        raise TypeError
    options = [(row, given[row.name]) for row in rows if row.by_name]
    return CompositeCall(
        tuple(row.taken(given[row.name]) for row in rows if not row.by_name),
        {row.name: value for row, value in options if not _is_default(value, row.default)},
    )


def _without_defaults(operator: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments without those at the end that are the operator's own defaults, as PyTorch writes calls."""
    kept = list(args)
    for argument, row in reversed(list(zip(args, _operator_parameters(operator), strict=False))):
        if not _is_default(argument, row.default):
            break
        kept.pop()
    return tuple(kept)


def _is_default(argument: Any, default: Any) -> bool:
    return type(argument) is type(default) and type(argument) in _COMPARED and argument == default


def _is_simple(call: CompositeCall) -> bool:
    tensors = [leaf for leaf in tree_flatten(call.args)[0] if isinstance(leaf, Tensor)]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if autocast_state():
        return False
    return all(isinstance(tensor, (FakeTensor, *PLAIN_TENSORS)) for tensor in tensors)


def _reflected(input: Any, other: Any) -> CompositeCall:
    return CompositeCall((other, input))


def _dropout(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> CompositeCall | None:
    count = input.numel()
    gives_input = not training or not p or (type(count) is int and not count)
    return CompositeCall((input, p, True)) if not inplace and not gives_input else None


def _by_name(order: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments under the names that a function gives them, in this order."""
    return {**dict(zip(order.split(), args, strict=False)), **named}


def _as_list(size: Any, dimensions: int) -> list[Any]:
    given = list(size) if isinstance(size, tuple | list) else [size]
    return given * dimensions if len(given) == 1 else given


def _batch_norm(*args: Any, **named: Any) -> CompositeCall | None:
    """One that trains writes to its statistics, and is taken apart."""
    order = "input running_mean running_var weight bias training momentum eps"
    given = _by_name(order, args, named)
    if given.get("training", False):
        return None
    tensors = [given.get(name) for name in ("input", "weight", "bias", "running_mean", "running_var")]
    numbers = given.get("momentum", 0.1), given.get("eps", 1e-5)
    return CompositeCall((*tensors, False, *numbers, torch.backends.cudnn.enabled))


def _softmax(
    input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> CompositeCall | None:
    return None if dim is None else CompositeCall((input, dim, dtype))


def _max_pool(*args: Any, **named: Any) -> CompositeCall | None:
    order = "input kernel_size stride padding dilation ceil_mode return_indices"
    given = _by_name(order, args, named)
    if given.get("return_indices", False):
        return None
    kernel, stride = given["kernel_size"], given.get("stride")
    sizes = (kernel, kernel if stride is None else stride, given.get("padding", 0), given.get("dilation", 1))
    return CompositeCall(
        (given["input"], *(_as_list(size, 2) for size in sizes), given.get("ceil_mode", False))
    )


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _cross_entropy(*args: Any, **named: Any) -> CompositeCall | None:
    """One that is given averaging in PyTorch's former words is taken apart."""
    order = "input target weight size_average ignore_index reduce reduction label_smoothing"
    given = {"reduction": "mean", "ignore_index": -100, **_by_name(order, args, named)}
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    tensors = (given["input"], given["target"], given.get("weight"))
    reduction = _REDUCTIONS.get(given["reduction"])
    smoothing = given.get("label_smoothing", 0.0)
    return (
        None if reduction is None else CompositeCall((*tensors, reduction, given["ignore_index"], smoothing))
    )


def _recurrent(input: Any, hidden: Any, parameters: Any, *options: Any) -> CompositeCall | None:
    """Those of packed rows have sizes second, and are taken apart."""
    is_packed = isinstance(options[0], list | tuple)
    return None if is_packed else CompositeCall((input, hidden, parameters, *options))


def _contiguous(input: Any, *, memory_format: Any = torch.contiguous_format) -> CompositeCall | None:
    kept = memory_format is torch.contiguous_format
    return CompositeCall((input,), {"memory_format": memory_format}) if kept else None


def _reshape(input: Any, *_shape: Any, **_named: Any) -> CompositeCall:
    return CompositeCall((input,))


def _nuclear(input: Any, *rest: Any, **named: Any) -> CompositeCall:
    is_of_dims = "dim" in named or isinstance(next(iter(rest), None), tuple | list)
    overload = aten.nuclear_norm.dim if is_of_dims else aten.nuclear_norm.default
    return replace(_as_declared(overload, (input, *rest), named), overload=overload)


def _of_order(number: OpOverload, text: OpOverload) -> Callable[..., CompositeCall]:
    """A call whose order is a number, or a text, which is another overload's."""

    def bind(input: Any, *rest: Any, **named: Any) -> CompositeCall:
        is_text = any(isinstance(each, str) for each in (*rest, *named.values()))
        overload = text if is_text else number
        return replace(_as_declared(overload, (input, *rest), named), overload=overload)

    return bind


_MATMUL, _SOFTMAX = Composite(aten.matmul.default), Composite(aten.softmax.int)
_LOG_SOFTMAX = Composite(aten.log_softmax.int)

_OF_ORDERS = {
    torch.linalg.norm: (aten.linalg_norm.default, aten.linalg_norm.ord_str),
    torch.linalg.matrix_norm: (aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord),
    torch.linalg.cond: (aten.linalg_cond.default, aten.linalg_cond.p_str),
}
"""Norms that may be of singular values, for which eager asks whether they will be differentiated."""
_NORMS: dict[Any, Composite] = {
    torch.nuclear_norm: Composite(aten.nuclear_norm.default, _nuclear),
    **{function: Composite(both[0], _of_order(*both)) for function, both in _OF_ORDERS.items()},
}
_BY_FUNCTION: dict[Any, Composite] = {
    F.linear: Composite(aten.linear.default),
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    Tensor.__rmatmul__: Composite(aten.matmul.default, _reflected),
    F.scaled_dot_product_attention: Composite(aten.scaled_dot_product_attention.default, mask="attn_mask"),
    F.layer_norm: Composite(aten.layer_norm.default),
    F.dropout: Composite(aten.dropout.default, _dropout, alike_apart=True),
    torch.conv1d: Composite(aten.conv1d.default),
    torch.conv2d: Composite(aten.conv2d.default),
    torch.conv3d: Composite(aten.conv3d.default),
    torch.conv_transpose1d: Composite(aten.conv_transpose1d.default),
    torch.conv_transpose2d: Composite(aten.conv_transpose2d.input),
    torch.conv_transpose3d: Composite(aten.conv_transpose3d.input),
    F.batch_norm: Composite(aten.batch_norm.default, _batch_norm),
    F.group_norm: Composite(aten.group_norm.default),
    F.rms_norm: Composite(aten.rms_norm.default),
    F.softmax: Composite(aten.softmax.int, _softmax),
    **dict.fromkeys((Tensor.softmax, torch.softmax), _SOFTMAX),
    F.log_softmax: Composite(aten.log_softmax.int, _softmax),
    **dict.fromkeys((Tensor.log_softmax, torch.log_softmax), _LOG_SOFTMAX),
    F.max_pool2d: Composite(aten.max_pool2d.default, _max_pool),
    torch.adaptive_avg_pool1d: Composite(aten.adaptive_avg_pool1d.default),
    F.adaptive_avg_pool2d: Composite(aten.adaptive_avg_pool2d.default),
    F.cross_entropy: Composite(aten.cross_entropy_loss.default, _cross_entropy),
    torch.lstm: Composite(aten.lstm.input, _recurrent),
    torch.gru: Composite(aten.gru.input, _recurrent),
    torch.rnn_tanh: Composite(aten.rnn_tanh.input, _recurrent),
    torch.rnn_relu: Composite(aten.rnn_relu.input, _recurrent),
    torch.svd: Composite(aten.svd.default),
    torch.linalg.svdvals: Composite(aten.linalg_svdvals.default),
    torch.linalg.eigvalsh: Composite(aten.linalg_eigvalsh.default),
}


def _itself(*args: Any, **kwargs: Any) -> CompositeCall:
    """Lists of a graph are a kind of their own."""
    plain = (list(argument) if isinstance(argument, list) else argument for argument in args)
    return CompositeCall(tuple(plain), kwargs)


def _batch_norm_itself(*args: Any, **kwargs: Any) -> CompositeCall | None:
    order = "input weight bias running_mean running_var training"
    return None if _by_name(order, args, kwargs)["training"] else CompositeCall(args, kwargs)


_AS_FUNCTIONS = (_dropout, _recurrent)
"""What is kept depends on the arguments, which functions and their operators order alike."""
_BY_OPERATOR = {
    row.operator: row if row.bind in _AS_FUNCTIONS else replace(row, bind=_itself)
    for row in _BY_FUNCTION.values()
} | {aten.batch_norm.default: Composite(aten.batch_norm.default, _batch_norm_itself)}
"""Captured programs call the operators themselves, whose arguments need no translation."""
_CONTIGUOUS = Composite(aten.clone.default, _contiguous, may_view=True)
_RESHAPE = Composite(aten._reshape_copy.default, _reshape, may_view=True)
_NORMS_THEMSELVES = (
    *(operator for both in _OF_ORDERS.values() for operator in both),
    *(aten.nuclear_norm.default, aten.nuclear_norm.dim),
)
COMPOSITES: Mapping[Any, Composite] = {
    **_BY_OPERATOR,
    **_NORMS,
    **{operator: Composite(operator, _itself) for operator in _NORMS_THEMSELVES},
    **_BY_FUNCTION,
    **dict.fromkeys((Tensor.contiguous, aten.contiguous.default), _CONTIGUOUS),
    **dict.fromkeys((Tensor.reshape, torch.reshape, aten.reshape.default), _RESHAPE),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _RESHAPE),
}
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
        return _to_be_taken_apart(recorder, composite)
    try:
        known = recorder.recognised(call.args)
        nodes = recorder.as_nodes(known)
    except (ComposedMet, NotPlain):
        return _to_be_taken_apart(recorder, composite)
    with _inside_composite(recorder, may_view=composite.may_view):
        result = recorder.called(function, args, kwargs)
    if composite.may_view and (
        not isinstance(result, FakeTensor) or storage_of(result) == storage_of(known[0])
    ):
        return None
    if composite is _RESHAPE:
        nodes = (*nodes, recorder.as_nodes(list(result.shape)))
    func = call.overload or composite.operator
    if composite.mask is not None and _is_trained(
        named_arguments(func, tuple(nodes), call.kwargs).get(composite.mask)
    ):
        recorder.listener.model.taken_apart(composite.operator)
    node = _appended(recorder, func, nodes, dict(call.kwargs), result)
    node.meta |= {MAY_VIEW: True} if composite.may_view else {}
    for position, part in enumerate(result if isinstance(result, tuple) else ()):
        _appended(recorder, operator.getitem, (node, position), {}, part)
    return result


def _is_trained(value: Any) -> bool:
    """Whether what has a gradient, if gradients are recorded, is among what a value is made of."""
    waiting, seen = [value] if isinstance(value, fx.Node) else [], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" and getattr(node.meta.get("val"), "requires_grad", False):
            return True
        waiting += (found := set(node.all_input_nodes) - seen)
        seen |= found
    return False


def _to_be_taken_apart(recorder: "Recorder", composite: Composite) -> None:
    """Say that what a composite is made of, in this grad mode, will be in the graph.

    Views are made of the same in every mode.
    """
    model = recorder.listener.model
    is_same = composite.may_view or composite.alike_apart
    if not (is_same or recorder.is_inside_composite or model.stops_gradients()):
        model.taken_apart(composite.operator)


@contextmanager
def _inside_composite(recorder: "Recorder", *, may_view: bool) -> Iterator[None]:
    """Record nothing inside the block."""
    recorder.is_inside_composite, recorder.is_told_of_views = True, may_view
    sizes = recorder.environment
    try:
        with nullcontext() if sizes is None else sizes.kept_whole():
            yield
    finally:
        recorder.is_inside_composite = recorder.is_told_of_views = False


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


_CALLS_COMPOSITES = frozenset({F.multi_head_attention_forward, torch.functional.norm, Tensor.norm})


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
