"""Fake tensors made directly, without the converter that PyTorch keeps for special ones."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from whence._torch.patching import BASES, patched
from whence._torch.tensors import LEFT_OUT, MISSED, PLAIN_ATTRIBUTES
from whence.errors import Place, UnsupportedInput

DEVICE = torch.ops.prim.device.default
"""What C++ asks of a tensor whose class is written in Python, where an exception would end the process."""


class _SaidInEager:
    """What a fake tensor is where code asks for its `__class__`, how `copy.copy` copies it, and which
    attributes code has looked for in vain."""

    __slots__ = ()
    __class__: Any = Tensor

    def __getattr__(self: Any, name: str) -> Any:
        vars(self).setdefault(MISSED, set()).add(name)
        held = vars(self).get(LEFT_OUT, {})
        if name not in held:
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if type(held[name]) not in PLAIN_ATTRIBUTES:
            raise held_by_argument("an argument", name)
        return held[name]

    def __copy__(self: Any) -> Tensor:
        copied: Tensor = self.detach()  # a leaf over the same memory, as in eager mode
        return copied.requires_grad_(self.requires_grad)


def held_by_argument(argument: str, question: str, where: Place | None = None) -> UnsupportedInput:
    """The error for a history, a gradient or a tensor that an argument brings along, and the model looks
    at."""
    return UnsupportedInput(
        f"the model looks at .{question} of {argument}, which brings that along",
        where=where or Place(),
        why="a program computes from what its arguments hold, and their past is none of that",
        remedy="pass a tensor without it (x.detach()), or pass in what the model reads of it",
    )


def classes_said_in_eager() -> AbstractContextManager[None]:
    """Inside the block `x.__class__` is that of eager mode also where `x` is a fake tensor.

    It is looked up in the classes of `x`, and none of PyTorch's can be given it after it was made: it comes
    from a base beside `Tensor`.
    """
    return patched(FakeTensor, BASES, (_SaidInEager, *FakeTensor.__bases__))


def class_in_eager(fake: FakeTensor) -> type[Tensor]:
    """The class of what a fake tensor stands for."""
    return nn.Parameter if isinstance(fake, nn.Parameter) else Tensor


def fake_like(
    mode: FakeTensorMode,
    like: Tensor,
    shape: Sequence[Any],
    strides: Sequence[Any],
    dtype: torch.dtype | None = None,
) -> FakeTensor:
    """A fake tensor on the device of `like` with a layout of its own; of its dtype, if no other is given."""
    return fake_at(mode, like.device, dtype or like.dtype, shape, strides)


@contextmanager
def told_alone(mode: FakeTensorMode) -> Iterator[None]:
    """What operators make of fake tensors, where that can be told without memory; what is wrong is raised,
    and written in no log."""
    with patched(mode, "allow_fallback_kernels", False), patched(_LOG, "disabled", True), mode:
        yield


_LOG = logging.getLogger(FakeTensorMode.__module__)


class FakeMaker:
    """Makes fake tensors that are like others; those of one device have all but their memory in common.

    PyTorch's constructor asks and sets that for each, which takes three times as long.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        warns = mode._allow_unsafe_data_ptr_access
        self._guard_address = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr
            if warns
            else torch._C._set_throw_on_mutable_data_ptr
        )
        self._in_common: dict[torch.device, dict[str, Any]] = {}

    def like(self, tensor: Tensor) -> FakeTensor:
        """A fake tensor that nobody knows."""
        return self._over(_memory_like(tensor), tensor.device)

    def pair_like(self, tensor: Tensor) -> tuple[FakeTensor, FakeTensor]:
        """Two fake tensors over one memory, which nobody knows."""
        memory = _memory_like(tensor)
        return self._over(memory, tensor.device), self._over(memory, tensor.device)

    def _over(self, memory: Tensor, device: torch.device) -> FakeTensor:
        if (in_common := self._in_common.get(device)) is None:
            first = FakeTensor(self._mode, memory, device)
            self._in_common[device] = dict(vars(first))
            return first
        made: FakeTensor = Tensor._make_subclass(
            FakeTensor, memory, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard_address(made)
        vars(made).update(in_common)
        return made


def _memory_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def fake_at(
    mode: FakeTensorMode,
    device: torch.device,
    dtype: torch.dtype,
    shape: Sequence[Any],
    strides: Sequence[Any],
) -> FakeTensor:
    """A fake tensor on a device, which need not be there."""
    with unset_fake_temporarily():  # a mode may take the memory for that of another device
        empty = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
    return FakeTensor(mode, empty, device)


def as_leaf(fake: FakeTensor, *, requires_grad: bool, is_parameter: bool) -> FakeTensor:
    """The fake tensor itself, as a leaf; `nn.Parameter` would run kernels to make another of it."""
    if requires_grad:
        fake.requires_grad_()
    if is_parameter:
        fake._is_param = True
        vars(fake)["__class__"] = nn.Parameter
    return fake


def as_leaf_like(fake: FakeTensor, like: Tensor) -> FakeTensor:
    """The fake tensor itself, as a leaf that is to autograd what another tensor is."""
    return as_leaf(fake, requires_grad=like.requires_grad, is_parameter=isinstance(like, nn.Parameter))


def fake_of(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor for a real one, and nothing of its numbers.

    From PyTorch 2.15 on a fake tensor without dimensions remembers the number that it was made of.
    """
    fake = mode.from_tensor(tensor, static_shapes=True)
    if isinstance(fake, FakeTensor):
        fake.item_memo = None
    return fake
