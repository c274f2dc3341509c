"""The device that a program is captured for, and fake tensors that say they are there."""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from whence._torch.elsewhere.casting import Casting
from whence._torch.elsewhere.fused import FUSED, updated
from whence._torch.elsewhere.layouts import laid_out
from whence._torch.fakes import DEVICE, as_leaf_like, fake_at
from whence._torch.sizes.symbols import mode_for_sizes
from whence._torch.tensors import PLAIN_TENSORS

Capability = tuple[int, int]
CAPABILITIES: Mapping[str, Capability] = {"sm80": (8, 0), "sm90": (9, 0)}
"""Those for which `attention` knows what PyTorch chooses."""
PRESUMED: Capability = (8, 0)
"""What is taken where nobody names one."""
_SPELLED = re.compile(r"(?P<kind>cuda)(:(?P<index>\d+))?(:(?P<capability>sm\d+))?")
_MARK = "whence_elsewhere"
TOLD = torch.device("meta")
"""What C++ is told where it asks for the device: its derivatives want a device with streams to be there."""


@dataclass(frozen=True)
class Elsewhere:
    """A device that a program is captured for; `capability` is None where nobody named one.

    `presumed` says, in words, what was taken for granted of it; the run adds to it.
    """

    device: torch.device
    capability: Capability | None = None
    presumed: dict[str, None] = field(default_factory=dict)

    @cached_property
    def casting(self) -> Casting:
        """What autocast does there."""
        return Casting(self.device.type)

    def __str__(self) -> str:
        named = "" if self.capability is None else ":sm{}{}".format(*self.capability)
        return f"{self.device}{named}"

    def presume(self, words: str) -> None:
        """Note what only the device could tell."""
        self.presumed[words] = None

    def is_here(self, device: Any) -> bool:
        """Whether a device is this one, with its number or without."""
        found = torch.device(device) if isinstance(device, str) else device
        return (
            isinstance(found, torch.device)
            and found.type == self.device.type
            and found.index in (None, self.device.index)
        )

    def knows(self, device: torch.device | None) -> bool:
        """Whether something may be on a device: on this one, or on the CPU."""
        return device is None or device.type == "cpu" or self.is_here(device)

    def told(self, device: torch.device) -> torch.device:
        """What C++ is told that a tensor is on."""
        return device if device.type == "cpu" else TOLD

    def meant(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of an operator, with the device that C++ means by what it was told."""
        given = kwargs.get("device")
        return {**kwargs, "device": self.device} if given == TOLD else dict(kwargs)


def spelled(text: object) -> Elsewhere | None:
    """The device that `"cuda"`, `"cuda:1"` or `"cuda:sm90"` means; None for what means none."""
    found = _SPELLED.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    named = found["capability"]
    if named is not None and named not in CAPABILITIES:
        return None
    device = torch.device(found["kind"], int(found["index"] or 0))
    return Elsewhere(device, None if named is None else CAPABILITIES[named])


def device_mode(elsewhere: Elsewhere, *, vary: bool = False) -> FakeTensorMode:
    """A mode for fake tensors that tells C++ the same, also where kernels written in Python run; sizes may
    `vary`."""
    mode: Any = mode_for_sizes(vary=vary)
    mode.dispatch = partial(_dispatched, elsewhere, mode)
    mode.allow_fallback_kernels = False  # no kernel of the device is here
    setattr(mode, _MARK, elsewhere)
    return mode  # type: ignore[no-any-return]


def _dispatched(
    elsewhere: Elsewhere, mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    if func is DEVICE and isinstance(args[0], FakeTensor):
        return elsewhere.told(args[0].device)
    if func in FUSED:
        return updated(mode, func, args, kwargs or {})
    result = FakeTensorMode.dispatch(mode, func, types, args, elsewhere.meant(kwargs or {}))
    return laid_out(mode, func, args, result)


def class_meant(fake: Tensor) -> type:
    """The class of the tensor that a twin stands for; that of the fake itself where it is none."""
    if not isinstance(fake, FakeTensor) or not hasattr(fake.fake_mode, _MARK):
        return type(fake)
    return nn.Parameter if getattr(fake, "_is_param", False) else Tensor


class Twins:
    """Fake tensors on a device, one for each tensor that is moved there; `.to` moves each by itself, too."""

    def __init__(self, elsewhere: Elsewhere, *, vary: bool = False) -> None:
        self.device = elsewhere.device
        self.mode = device_mode(elsewhere, vary=vary)
        self._kept: dict[int, Tensor] = {}
        self._known: dict[int, Any] = {}

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """Let these tensors be as they are: `.to` moves parameters and buffers alone."""
        for tensor in tensors:
            self._note(tensor, tensor)

    def of(self, tensor: Tensor) -> Tensor:
        """The twin of a tensor, with the strides that a copy of it has."""
        if id(tensor) not in self._known:
            self._note(tensor, self._made(tensor))
        known: Tensor = self._known[id(tensor)]
        return known

    def copy_of(self, thing: Any) -> Any:
        """A copy of a module, or of what holds some, over the twins."""
        return deepcopy(thing, self._known)

    def _note(self, tensor: Tensor, twin: Tensor) -> None:
        self._kept[id(tensor)] = tensor
        self._known[id(tensor)] = twin

    def _made(self, tensor: Tensor) -> FakeTensor:
        with torch.no_grad():
            like = torch.empty_like(tensor, device="meta")
        made = fake_at(self.mode, self.device, like.dtype, like.shape, like.stride())
        return as_leaf_like(made, tensor)


def is_movable(tensor: Tensor) -> bool:
    """Whether a twin says all that there is to say of a tensor: it is dense, and of no class of its own."""
    plain = isinstance(tensor, (FakeTensor, *PLAIN_TENSORS)) and tensor.layout is torch.strided
    return plain and not tensor.is_quantized
