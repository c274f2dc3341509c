"""Record a training step: what an optimizer computes with Python's numbers, too."""

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import SymFloat, Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from whence._torch.autograd.nodes import below_autograd
from whence._torch.fakes import FakeTensorMode
from whence._torch.function_tracer import FunctionTracer
from whence._torch.pytrees import tree_map_only, whole_leaves
from whence._torch.record.annotations import note_function
from whence._torch.record.direct_recording import unaliased
from whence._torch.record.function_mode import FunctionMode
from whence._torch.record.listener import ModelListener, RecordingListener
from whence._torch.record.recorder import Recorder
from whence._torch.sizes.numbers import (
    ITEM,
    Arithmetic,
    as_node,
    as_recorded,
    holds_recorded,
    is_recorded,
    stays,
    tensor_of,
    without_recorded,
)
from whence._torch.subclasses.wrapper_subclasses import is_composed


class NumberListener(ModelListener, Protocol):
    """What is asked beside."""

    @property
    def reads_numbers(self) -> bool:
        """Whether the numbers that are read of tensors now are part of the program."""

    def gradient_set(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """The step writes `tensor.grad = gradient`."""

    def number_needed(self, node: fx.Node, remedy: str = "") -> Exception:
        """Python decides by a number that a node gives, or needs it and then a `remedy`; make the error."""

    def number_decides(self, target: Any, operands: tuple[Any, ...]) -> Any:
        """What is decided by such numbers; raises where nobody knows."""

    def number_known(self, number: Any) -> Any:
        """What such a number is now; None where only a run knows."""


_TENSOR: Any = Tensor
_SET_GRADIENT, _DELETE_GRADIENT = _TENSOR.grad.__set__, _TENSOR.grad.__delete__
_SET_ITEM, _INDEX_PUT = Tensor.__setitem__, torch.ops.aten.index_put_.default
_MAKERS = (torch.tensor, torch.as_tensor)
_TAKING_FLOATS = {
    torch._fused_adam_: torch.ops.aten._fused_adam_.default,
    torch._fused_adamw_: torch.ops.aten._fused_adamw_.default,
    torch._fused_sgd_: torch.ops.aten._fused_sgd_.default,
    torch._fused_adagrad_: torch.ops.aten._fused_adagrad_.default,
}
"""Kernels that update all parameters at once take floats, of which C++ would ask for the numbers."""


class StepFunctionMode(FunctionMode):
    """Tells of gradients that the step puts under a tensor itself.

    What `Tensor.item` gives comes through C++, which makes a bare `SymFloat` of it.
    """

    recorder: "StepRecorder"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_GRADIENT:
            self.recorder.listener.model.gradient_set(args[0], args[1])
        if func == _DELETE_GRADIENT:
            self.recorder.listener.model.gradient_set(args[0], None)
        if func in _MAKERS and holds_recorded(args):
            return tensor_of(*args, **(kwargs or {}))
        if func == _SET_ITEM and _is_at_number(args[1]):
            func, args = _INDEX_PUT, _put_at_number(*args)
        try:
            return as_recorded(super().__torch_function__(func, types, args, kwargs))
        except (TypeError, IndexError, RuntimeError) as error:
            is_of_numbers = holds_recorded((*args, *(kwargs or {}).values()))
            if not is_of_numbers or (isinstance(error, RuntimeError) and _NO_LIST not in str(error)):
                raise
            args, named = tree_map_only(SymFloat, _decided, (args, kwargs or {}))
            return as_recorded(super().__torch_function__(func, types, args, named))

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _TAKING_FLOATS and holds_recorded(kwargs.values()):
            return self.recorder.given_numbers(_TAKING_FLOATS[func], args, kwargs)
        return super()._called(func, args, kwargs)


_NOT_FUSED = "make the optimizer without fused=True: its kernel takes no number that only a run knows"
_NOT_HANDED_ON = "let its class give the number to an operation on the parts as it is"
_NO_LIST = "PyList_Check(arg)"
"""What C++ says of such a number in the place of a list of integers."""


def _is_at_number(index: Any) -> bool:
    """Whether an index is such a number, perhaps beside plain numbers and whole dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    others = [part for part in parts if not is_recorded(part)]
    is_plain = all(type(part) is int or (type(part) is slice and part == slice(None)) for part in others)
    return is_plain and len(others) < len(parts)


def _put_at_number(tensor: Tensor, index: Any, value: Any) -> tuple[Any, ...]:
    """What writes at a number that only a run knows: with tensors for the index."""
    parts = index if isinstance(index, tuple) else (index,)
    at = [None if isinstance(part, slice) else tensor_of(part) for part in parts]
    made = value if isinstance(value, Tensor) else tensor_of(value, device=tensor.device)
    return tensor, at, made.to(tensor.dtype)


def _decided(number: Any) -> Any:
    """The integer that such a number is, which every run must have then."""
    is_whole = is_recorded(number) and number.node.arithmetic.is_whole(number)
    return operator.index(as_recorded(number)) if is_whole else number


_COUNTING = (torch.ops.aten.arange, torch.ops.aten.range)
"""Operators whose result has a size by the numbers that they are given."""


def _counted(numbers: Any) -> tuple[Any, ...]:
    """Numbers to count through that are as many as these: how many there are is decided, not which."""
    known = [as_recorded(number) for number in numbers]
    if not all(isinstance(number, int) for number in known):
        return tuple(operator.index(each) if isinstance(each, int) else float(each) for each in known)
    if len(known) == 1:
        return (operator.index(known[0]),)
    first, last, *step = known
    return (0, operator.index(last - first), *map(operator.index, step))


class StepRecording(RecordingListener, Protocol):
    """Who is told of the recording of a step."""

    @property
    def model(self) -> NumberListener:
        """Who is told of the model, and of the optimizer."""


class StepRecorder(Recorder):
    """Knows the numbers that are read from tensors, where the listener says so."""

    listener: StepRecording
    function_mode = StepFunctionMode

    def __init__(
        self,
        listening: Callable[[Any], StepRecording],
        fake_mode: FakeTensorMode,
        *,
        functions: FunctionTracer | None = None,
    ) -> None:
        super().__init__(listening, fake_mode, is_joint=True, functions=functions)
        model = self.listener.model
        self._handed_on: HandedOn | None = None
        self.arithmetic = Arithmetic(
            self._append_number, model.number_needed, model.number_decides, model.number_known
        )

    def note_branch(self, target: Any, operands: tuple[Any, ...], answer: Any, branch: str) -> None:
        """A node that says which way a branch went, and raises where it goes the other."""
        found = self._append_number(target, tuple(map(as_node, operands)))
        found.meta["val"] = answer
        self._append_number(stays, (found, answer, branch)).meta["val"] = None

    def number_input(self, name: str) -> Any:
        """A number that is an input of the program, and its placeholder."""
        node = self.constant_input(None, name)
        return self.arithmetic.number(node), node

    def constant_number(self, value: float) -> fx.Node:
        """A node that gives a number which is the same in every run."""
        return self._append_number(operator.pos, (value,))

    def _append_number(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        args = tuple(float(value) if isinstance(value, float) else value for value in args)  # not NumPy's
        node = self.tracer.graph.create_node("call_function", target, args, {})
        self.listener.recorded(node)
        return node

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is ITEM and _is_numeric(args[0].dtype) and self.listener.model.reads_numbers:
            held = self.node_of(self.recognised(args[0]))
            return self.arithmetic.number(self._append_number(func, (held,)))
        if self._handed_on is not None and not _holds_composed(args, kwargs):
            args, kwargs = self._handed_on.given_back(args, kwargs)
        if holds_recorded(args) or (kwargs and holds_recorded(kwargs.values())):
            if _holds_composed(args, kwargs):
                return self._record_in_parts(func, args, kwargs or {})
            return self._record_with_numbers(func, args, kwargs or {})
        return super()._dispatched(func, types, args, kwargs)

    def _record_in_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let the class of a composed tensor run an operator on the parts, which are given the numbers."""
        outer, self._handed_on = self._handed_on, HandedOn()
        try:
            args, kwargs = self._handed_on.in_place_of((args, kwargs))
            with self:
                result = func(*args, **kwargs)
            if (lost := self._handed_on.lost) is not None:
                raise self.listener.model.number_needed(as_node(lost), _NOT_HANDED_ON)
        finally:
            self._handed_on = outer
        return result

    def given_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operator that is given numbers which only a run knows, past C++ that would want them."""
        if _holds_composed(args, kwargs):
            number = next(filter(is_recorded, kwargs.values()))
            raise self.listener.model.number_needed(as_node(number), _NOT_FUSED)
        with disable_proxy_modes_tracing(), below_autograd():
            return self._record_with_numbers(func, args, kwargs)

    def _record_with_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator with stand-ins for the numbers that only a run knows."""
        args, kwargs = self.recognised(args), {key: self.recognised(value) for key, value in kwargs.items()}
        node_args = self._with_nodes(args)
        node_kwargs = {key: self._with_nodes(value) for key, value in kwargs.items()}
        stand_ins = _counted(args) if func.overloadpacket in _COUNTING else without_recorded(args)
        result = unaliased_or_nothing(func(*stand_ins, **without_recorded(kwargs)))
        tracer = self.tracer
        node = tracer.graph.create_node(
            "call_function", func, node_args, node_kwargs, func.overloadpacket.__name__
        )
        note_function(tracer, node)
        if result is None:
            node.meta["val"] = None
            self.listener.recorded(node)
            return None
        self.track(result, node)
        self.listener.recorded(node)
        if not isinstance(result, Tensor):
            for position, part in enumerate(result):
                self.track_part(node, position, part)
        return result

    def _with_nodes(self, value: Any) -> Any:
        """Arguments with nodes in the place of tensors, also where their values are known, and of numbers."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (list, tuple)):
            return type(value)([self._with_nodes(item) for item in value])
        return as_node(value) if is_recorded(value) else self.as_nodes(value)


class HandedOn:
    """Numbers that only a run knows, while the class of a composed tensor runs an operator on its parts.

    That class may look at them, and at what it decided by others: it is given plain numbers in their place,
    which nobody computes with, and the operation on the parts is given those that they stand for.
    """

    def __init__(self) -> None:
        self._known: dict[float, Any] = {}
        self._met: set[float] = set()

    def in_place_of(self, arguments: Any) -> Any:
        """Arguments with a plain number in the place of each of them."""
        return tree_map_only(SymFloat, self._plain, arguments)

    def _plain(self, number: Any) -> Any:
        if not is_recorded(number):
            return number
        is_whole = number.node.arithmetic.is_whole(number)
        plain = (_UNLIKELY if is_whole else _UNLIKELY + 0.5) + len(self._known)
        self._known[plain] = number
        return plain

    def given_back(self, args: Any, kwargs: Any) -> Any:
        """Arguments with the numbers in the place of what stands for them."""
        return tree_map_only((int, float), self._number, (args, kwargs or {}))

    def _number(self, value: Any) -> Any:
        if value not in self._known:
            return value
        self._met.add(value)
        return self._known[value]

    @property
    def lost(self) -> Any:
        """One that no operation on the parts was given."""
        return next((number for plain, number in self._known.items() if plain not in self._met), None)


_UNLIKELY = 9_369_319
"""With what the plain numbers begin: nothing is decided by them, and no model has them."""


def _holds_composed(args: Any, kwargs: Any) -> bool:
    return any(map(is_composed, whole_leaves((args, kwargs))))


def _is_numeric(dtype: torch.dtype) -> bool:
    """Whether Python computes with what a tensor of this kind holds: not with truths."""
    return not (dtype.is_complex or dtype is torch.bool)


def unaliased_or_nothing(result: Any) -> Any:
    """Results that are tensors of their own, or None."""
    return None if result is None or result == () else unaliased(result)
