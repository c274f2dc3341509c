"""Operators that run functions, called with functions that close over nothing.

A branch reads weights and activations from around it. PyTorch's compiler hands them to the operator as
further operands, so that gradients come back for them; here `close` says what each function reads, and a row
for each operator says on which examples its functions run and where further operands go.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

from whence._torch.autograd.nodes import below_autograd
from whence._torch.fakes import FakeMaker, FakeTensor
from whence._torch.higher_order.function_graphs import recording_paused
from whence._torch.operators.schemas import HigherOrderOperator
from whence._torch.pytrees import TreeSpec, tree_map_only, tree_unflatten
from whence._torch.record.adopted import fresh_like
from whence._torch.record.function_mode import FunctionMode
from whence._torch.record.recorder import Recorder, RecordingListener
from whence._torch.sizes.symbols import expression, is_symbolic

_WHILE = torch.ops.higher_order.while_loop


@dataclass(frozen=True)
class Closed:
    """Functions that take what they read as further arguments.

    `outside` are those, the same for each. `spec` is the structure of what they return, and `constants` the
    leaves that are no tensors, by position: the closed functions return the others in a flat tuple.
    """

    functions: tuple[Any, ...]
    outside: tuple[Any, ...]
    spec: TreeSpec
    constants: dict[int, Any]

    def whole(self, results: Sequence[Any]) -> Any:
        """What the operator returns, in the structure of what its functions return."""
        leaves = iter(results)
        positions = range(self.spec.num_leaves)
        filled = [self.constants[at] if at in self.constants else next(leaves) for at in positions]
        return tree_unflatten(filled, self.spec)


@dataclass(frozen=True)
class StepSlice:
    """An example: what one step of a loop gets of a tensor."""

    of: Tensor


@dataclass(frozen=True)
class Number:
    """An example: a tensor without dimensions, on the device of another one; its gradient is wanted where
    that of the other is and it can have one."""

    beside: Tensor
    dtype: torch.dtype


class Close(Protocol):
    """Closes functions on example arguments; one that returns a lone tensor may return its argument."""

    def __call__(self, functions: tuple[Any, ...], examples: Sequence[Any], *, lone: bool = False) -> Closed:
        """The closed functions."""


@dataclass(frozen=True)
class ClosedCall:
    """The arguments of an operator with closed functions, and what makes its results whole."""

    args: tuple[Any, ...]
    whole: Callable[[Any], Any]


def _cond(close: Close, condition: Any, true: Any, false: Any, operands: Any) -> ClosedCall:
    closed = close((true, false), operands)
    return ClosedCall((condition, *closed.functions, (*operands, *closed.outside)), closed.whole)


def _while(close: Close, condition: Any, body: Any, carried: Any, more: Any = ()) -> ClosedCall:
    going = close((condition,), (*carried, *more), lone=True)
    step = close((body,), (*carried, *more))
    outside = tuple({id(value): value for value in (*going.outside, *step.outside)}.values())
    first = _taking(going, len(carried) + len(more), outside)
    second = _taking(step, len(carried) + len(more), outside)
    return ClosedCall((first, second, carried, (*more, *outside)), step.whole)


def _taking(closed: Closed, count: int, outside: Sequence[Any]) -> Any:
    """A closed function that takes more from outside than it reads."""
    at = [[id(value) for value in outside].index(id(value)) for value in closed.outside]
    function = closed.functions[0]

    def taking(*args: Any) -> Any:
        given, rest = args[:count], args[count:]
        return function(*given, *(rest[position] for position in at))

    return taking


def _scan(close: Close, step: Any, init: Any, xs: Any, more: Any = ()) -> ClosedCall:
    closed = close((step,), (*init, *map(StepSlice, xs), *more))
    return ClosedCall((*closed.functions, init, xs, (*more, *closed.outside)), closed.whole)


def _associative_scan(close: Close, combine: Any, xs: Any, more: Any = ()) -> ClosedCall:
    closed = close((combine,), (*map(StepSlice, xs), *map(StepSlice, xs), *more))
    return ClosedCall((*closed.functions, xs, (*more, *closed.outside)), closed.whole)


def _map(close: Close, body: Any, xs: Any, more: Any = (), **_written: str) -> ClosedCall:
    closed = close((body,), (*map(StepSlice, xs), *more))
    return ClosedCall((*closed.functions, xs, [*more, *closed.outside]), closed.whole)


def _flex_attention(close: Close, query: Any, *rest: Any) -> ClosedCall:
    key, value, score, mask, scale, options, *buffers = rest
    of_score, of_mask = buffers or ((), ())
    number, place = Number(query, query.dtype), [Number(query, torch.int)] * 4
    # a module of PyTorch's compiler, which takes seconds to load
    indexing: Any = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    with indexing.TransformGetItemToIndex():
        scores = close((score,), (number, *place, *of_score), lone=True)
        masks = close((mask[-1],), (*place, *of_mask), lone=True)
    args = (query, key, value, *scores.functions, (*mask[:-1], *masks.functions), scale, options)
    return ClosedCall((*args, (*of_score, *scores.outside), (*of_mask, *masks.outside)), _as_is)


def _as_is(results: Any) -> Any:
    return results


def record_loop(
    recorder: Recorder,
    condition: Any,
    body: Any,
    carried: Sequence[Any],
    more: Sequence[Any] = (),
    **_rest: Any,
) -> Any:
    """The rule for `while_loop`; PyTorch's own counts on symbols for sizes, which a recording may not have.

    What it gives is like what one round gives, which must be like what the round was given.
    """
    branches = recorder.listener.model.branches
    if not all(isinstance(value, Tensor) for value in carried):
        raise branches.refused(_WHILE, "it carries a number: carry a tensor that holds it")
    with disable_proxy_modes_tracing():
        graphs = [branches.traced(each, (*(x.clone() for x in carried), *more)) for each in (condition, body)]
    results = [node.meta["val"] for node in _returned(graphs[1])]
    gives, takes = (list(map(_shape_and_kind, values)) for values in (results, carried))
    if gives != takes:
        why = f"its body returns {gives} for {takes}"
        raise branches.refused(_WHILE, why)
    tracer: Any = recorder.tracer
    for name, graph in zip(("while_loop_cond_graph", "while_loop_body_graph"), graphs, strict=True):
        recorder.nested.register_module(tracer.get_fresh_qualname(f"{name}_"), graph)
    given = tree_map_only(Tensor, tracer.unwrap_proxy, (*graphs, tuple(carried), tuple(more)))
    proxy = tracer.create_proxy("call_function", _WHILE, given, {}, name="while_loop")
    fresh = recorder.fresh(results)
    return track_tensor_tree(fresh, proxy, constant=None, tracer=tracer)


def _returned(graph: fx.GraphModule) -> Sequence[fx.Node]:
    nodes: Any = next(iter(reversed(graph.graph.nodes))).args[0]
    return nodes  # type: ignore[no-any-return]


def _shape_and_kind(tensor: Any) -> Any:
    return (tuple(tensor.shape), tensor.dtype, tensor.device)


class _Undifferentiated(torch.autograd.Function):
    """An operator whose results lead back to its operands, and whose derivative is not recorded."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], Any], refused: Callable[[], Exception], *_: Any) -> Any:
        ctx.refused = refused
        return call()

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        """Nobody may ask."""
        raise ctx.refused()


def undifferentiated(
    call: Callable[[], Any], operands: Sequence[Any], refused: Callable[[], Exception]
) -> Any:
    """What an operator gives, recorded as it is; its derivative, where one is asked for, is `refused`."""

    def below() -> Any:
        with below_autograd():
            return call()

    tensors = [value for value in operands if isinstance(value, Tensor)]
    return _Undifferentiated.apply(below, refused, *tensors)


_FORMS: dict[str, Callable[..., ClosedCall]] = {
    "cond": _cond,
    "while_loop": _while,
    "scan": _scan,
    "associative_scan": _associative_scan,
    "map_impl": _map,
    "flex_attention": _flex_attention,
}


def form_of(operator: HigherOrderOperator) -> Callable[..., ClosedCall] | None:
    """How an operator is called with closed functions, where that is known."""
    return _FORMS.get(operator.name())


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Weights that are cast inside the block are cast again outside: the cache would carry them over."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class BranchRecorder(Recorder):
    """Records a function that an operator runs into a graph of its own, in the fake mode of the recording
    around it.

    What it does not know when an operation asks for it comes from outside.
    """

    def __init__(self, listener: RecordingListener, around: Recorder) -> None:
        super().__init__(lambda _: listener, around.fake_mode, keeps_composites=around.keeps_composites)
        if self.environment is not None:
            self.environment.listen(required=around._require)

    def argument(self, value: Any, name: str) -> fx.Node:
        """Give an argument of the function a placeholder."""
        if isinstance(value, Tensor):
            return self.placeholder(value, name)
        node = self.constant_input(value, name)
        if self.sizes is not None and is_symbolic(value):
            self.sizes.is_held_by(node, value)
        return node

    def placeholder(self, tensor: Tensor, name: str) -> fx.Node:
        """Give a fake `tensor` a placeholder; sizes that vary are read from it."""
        node = super().placeholder(tensor, name)
        (node.meta["val"],) = self.fresh([tensor])  # the tensor may be one of the run, which is to be let go
        for dim, size in enumerate(tensor.shape if self.sizes is not None else ()):
            if is_symbolic(size) and expression(size).is_Symbol:
                self.sizes.read(node, dim, size, 1, 0)  # type: ignore[union-attr]
        return node

    def unread(self, like: fx.Node) -> fx.Node:
        """A placeholder for what the function gets and does not read."""
        return self.constant_input(like.meta["val"], like.name)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record this function on this thread inside the block, and not what is around it."""
        with (
            recording_paused(),
            self.fake_mode,
            without_autocast_cache(),
            nullcontext() if self.environment is None else self.environment.listening(required=self._require),
            FunctionMode(self),
            self,
        ):
            yield

    def example(self, value: Any) -> Any:
        """A leaf like an argument, for the function to run on."""
        with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            if isinstance(value, Number):
                empty = torch.empty((), dtype=value.dtype, device="meta")
                made: Tensor = FakeTensor(self.fake_mode, empty, value.beside.device)
                wanted = value.beside.requires_grad and made.is_floating_point()
                return made.requires_grad_(wanted)
            tensor = value.of if isinstance(value, StepSlice) else value
            if not isinstance(tensor, Tensor):
                return tensor
            like = tensor if isinstance(tensor, FakeTensor) else self.fake_mode.from_tensor(tensor)
            with torch.no_grad(), self.fake_mode:
                fresh = torch.select_copy(like, 0, 0) if isinstance(value, StepSlice) else like.detach()
            return fresh_like(FakeMaker(self.fake_mode), fresh).requires_grad_(tensor.requires_grad)
