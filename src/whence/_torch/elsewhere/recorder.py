"""A recording of what a model does on a device that need not be here."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.amp import GradScaler, autocast
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode

from whence._torch.elsewhere.groups import grouped_as_there
from whence._torch.elsewhere.kernels import RULES, UNSAID, There
from whence._torch.elsewhere.target import Elsewhere
from whence._torch.fakes import DEVICE
from whence._torch.operators.composites import calls_composites, in_sight
from whence._torch.operators.cudnn import is_for_cudnn
from whence._torch.patching import patched
from whence._torch.record.annotations import note_function
from whence._torch.record.function_mode import FunctionMode
from whence._torch.record.recorder import Recorder, RecordingListener
from whence._torch.record.step_recorder import StepFunctionMode, StepRecorder
from whence.errors import UnsupportedOperator

_aten = torch.ops.aten
OF_THE_DEVICE = (_aten.silu_backward, _aten.mish_backward, _aten._fused_rms_norm)
"""Operators with a kernel on the device, which a PyTorch without that device would take apart."""
_MOVE = torch.ops.aten._to_copy.default
_TENSOR: Any = Tensor
SCALER = "it turns itself off where there is no CUDA device, and on one it decides by values of the run"
WITHOUT_SCALER = "leave it out of the step: train in bfloat16, or capture where the device is"
Answer = Callable[..., Any]


class ElsewhereFunctionMode(FunctionMode):
    """Answers what Python asks of the device."""

    recorder: "ElsewhereRecorder"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        elsewhere, answer = self.recorder.there.elsewhere, ANSWERS.get(func)
        if answer is not None:
            known = answer(elsewhere, *args, **(kwargs or {}))
            if known is not UNSAID:
                return known
        with elsewhere.casting.around(args, kwargs):
            return super().__torch_function__(func, types, args, kwargs)


class ElsewhereRecorder(Recorder):
    """Takes apart what the device takes apart otherwise, and means the device where C++ names another."""

    function_mode = ElsewhereFunctionMode
    there: There

    def for_device(self, elsewhere: Elsewhere) -> None:
        """Say which device it is."""
        self.there = There(elsewhere, self.listener.model.here, self.is_joint)

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a torch function gives there."""
        rule = RULES.get(func)
        if is_for_cudnn(func, args) and torch.is_autocast_enabled(self.there.elsewhere.device.type):
            raise self.there.refused(
                f"{func.__name__} under autocast",
                "there C++ casts all weights into one buffer of cuDNN's",
                "leave recurrent networks out of autocast: torch.autocast(..., enabled=False) around them",
            )
        args, kwargs = self.there.elsewhere.casting.cast(func, args, kwargs)
        given = UNSAID if rule is None else rule(self.there, *args, **kwargs)
        if given is not UNSAID:
            return given
        if rule is None and calls_composites(func) and not self.keeps_composites:
            with self.function_mode(self):
                return self.functions.told(in_sight(func), *args, **kwargs)
        return super().called(func, args, kwargs)

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        elsewhere = self.there.elsewhere
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return elsewhere.told(args[0].device)
        kwargs = elsewhere.meant(kwargs or {})
        if not elsewhere.knows(kwargs.get("device")):
            raise self.there.refused(
                f"something on {kwargs['device']}",
                "a program is captured for one device, and for the CPU beside it",
                "leave out the other device, or capture where both are",
            )
        if func is _MOVE and elsewhere.is_here(kwargs.get("device")):
            return self._moved(func, args, kwargs)
        return super()._dispatched(func, types, args, kwargs)

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A copy on the device; of numbers that the recording knows nobody does there."""
        source = self.recognised(args[0])
        node = self.graph.create_node("call_function", func, (self.node_of(source),), kwargs)
        note_function(self.tracer, node)
        made = func(source, **kwargs)
        self.track(made, node)
        self.listener.recorded(node)
        return made


class ElsewhereStepFunctionMode(ElsewhereFunctionMode, StepFunctionMode):
    """The same in a step."""

    recorder: "ElsewhereStepRecorder"


class ElsewhereStepRecorder(ElsewhereRecorder, StepRecorder):
    """The same of a whole step, whose state lies there for as long as it runs."""

    function_mode = ElsewhereStepFunctionMode

    def adopt_all(self, named: Sequence[tuple[Tensor, str]]) -> list[fx.Node]:
        """Fakes are on the CPU again when the run is over: others stand for them, too."""
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            return [self._adopted_as(tensor, name) for tensor, name in named]


class _Told(TorchDispatchMode):
    """Tells C++ of fakes on the device what their derivatives can work with, where no recording goes on."""

    supports_higher_order_operators = True

    def __init__(self, elsewhere: Elsewhere) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casting = self._elsewhere.casting
        if func is DEVICE and isinstance(args[0], FakeTensor):
            asked = args[0].device
            return asked if casting.asks(args[0]) else self._elsewhere.told(asked)
        return casting.run(func, args, kwargs or {})


@contextmanager
def told(elsewhere: Elsewhere) -> Iterator[None]:
    """Inside the block fakes on the device may be differentiated."""
    with (
        device_queries(elsewhere),
        grouped_as_there(),
        torch.library._scoped_library("aten", "IMPL") as library,
        _Told(elsewhere),
    ):
        for name in (operator.__name__ for operator in OF_THE_DEVICE):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, _nobody, "CUDA")
        try:
            yield
        finally:
            elsewhere.casting.forget()


def _nobody(*_args: Any, **_kwargs: Any) -> Any:
    raise NotImplementedError("a kernel of a device that is not here")


R = TypeVar("R", bound=Recorder)
_THERE: Mapping[type[Recorder], type[ElsewhereRecorder]] = {
    Recorder: ElsewhereRecorder,
    StepRecorder: ElsewhereStepRecorder,
}


def recorder_for(
    elsewhere: Elsewhere | None,
    kind: type[R],
    listening: Callable[[Any], RecordingListener],
    fake_mode: FakeTensorMode,
    **options: Any,
) -> R:
    """A recorder of a kind, for a device or for that on which the tensors are."""
    if elsewhere is None:
        return kind(listening, fake_mode, **options)
    recorder: Any = _THERE[kind](listening, fake_mode, **options)
    recorder.for_device(elsewhere)
    return recorder  # type: ignore[no-any-return]


def _is(kind: str, _elsewhere: Elsewhere, tensor: Tensor) -> bool:
    return tensor.device.type == kind


def _index(_elsewhere: Elsewhere, tensor: Tensor) -> int:
    return -1 if tensor.device.index is None else tensor.device.index


def _to(elsewhere: Elsewhere, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Where a tensor is to go to the device that it is on, the device is left out of it."""
    if not elsewhere.is_here(tensor.device):
        return UNSAID
    kept = [each for each in args if not (isinstance(each, (str, torch.device)) and elsewhere.is_here(each))]
    named = {name: each for name, each in kwargs.items() if name != "device" or not elsewhere.is_here(each)}
    if len(kept) == len(args) and len(named) == len(kwargs):
        return UNSAID
    others = [each for each in (*kept, *named.values()) if not isinstance(each, bool)]
    if not others and not named.get("copy", False) and True not in kept[1:]:
        return tensor
    return tensor.to(*kept, **named)


def _cuda(elsewhere: Elsewhere, tensor: Tensor, device: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    stays = elsewhere.is_here(tensor.device) and (device is None or _is_number_of(elsewhere, device))
    return tensor if stays else UNSAID


def _is_number_of(elsewhere: Elsewhere, device: Any) -> bool:
    return device == elsewhere.device.index if isinstance(device, int) else elsewhere.is_here(device)


ANSWERS: Mapping[Any, Answer] = {
    _TENSOR.is_cuda.__get__: partial(_is, "cuda"),
    _TENSOR.is_cpu.__get__: partial(_is, "cpu"),
    _TENSOR.is_meta.__get__: partial(_is, "meta"),
    _TENSOR.get_device: _index,
    _TENSOR.to: _to,
    _TENSOR.cuda: _cuda,
}


@contextmanager
def device_queries(elsewhere: Elsewhere) -> Iterator[None]:
    """Inside the block this thread's questions for a device are noted; autocast asks none there, and scalers
    of gradients are refused."""
    here, starting = threading.get_ident(), list[object]()
    available, begin, scale = torch.cuda.is_available, autocast.__init__, GradScaler.scale

    def is_available() -> bool:
        if starting and threading.get_ident() == here:
            return True
        asking = sys._getframe(1)
        if threading.get_ident() == here and not _is_of_torch(asking.f_globals.get("__name__", "")):
            where = f"{asking.f_code.co_filename}:{asking.f_lineno}"
            elsewhere.presume(f"torch.cuda.is_available() answered as on this machine, at {where}")
        return available()

    def starts(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        is_there = threading.get_ident() == here and device_type == elsewhere.device.type
        if not is_there:
            return begin(self, device_type, *args, **kwargs)
        starting.append(self)
        try:
            with patched(torch.cuda, "is_bf16_supported", lambda *_, **__: True):
                begin(self, device_type, *args, **kwargs)
        finally:
            starting.pop()

    def scaled(self: Any, outputs: Any) -> Any:
        if threading.get_ident() == here:
            what = f"a GradScaler cannot be recorded for {elsewhere.device.type}"
            raise UnsupportedOperator(what, why=SCALER, remedy=WITHOUT_SCALER)
        return scale(self, outputs)

    with (
        patched(torch.cuda, "is_available", is_available),
        patched(autocast, "__init__", starts),
        patched(GradScaler, "scale", scaled),
    ):
        yield


def _is_of_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"
